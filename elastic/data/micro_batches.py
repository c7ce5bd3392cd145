"""Divides a rank's share of a global batch into micro-batches. Pure.

All ranks get the same number of them, so that all take part in the same collectives, and each has
the weight that keeps the mean over the global batch exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from keepstep.elastic.data.order import share
from keepstep.elastic.errors import UsageError


class MicroBatch(NamedTuple):
    """A part of a rank's share of a global batch.

    Attributes:
        batch: the collated samples.
        loss_scale: factor for the mean loss of these samples. The gradients of a step's
            micro-batches then add up so that their average over ranks is the global batch's.
        is_last: whether it is the step's last one.
    """

    batch: Any
    loss_scale: float
    is_last: bool


@dataclass(frozen=True, slots=True)
class Division:
    """The samples `begin` to `end - 1` of a rank's share, and the factor for their mean loss."""

    begin: int
    end: int
    loss_scale: float


def divide(global_batch: int, at_most: int, rank: int, world_size: int) -> tuple[Division, ...]:
    """Return the micro-batches of a rank: as few as possible, and equally many on all ranks.

    Sizes differ by one at most. One that would be empty repeats a sample of the share with weight
    0; this happens only with `at_most` 1 and uneven shares.

    Args:
        global_batch: samples per step over all ranks.
        at_most: samples per micro-batch, at most.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.

    Raises:
        UsageError: `at_most` is not positive, or there are more ranks than samples in a batch.
    """
    if at_most < 1:
        raise UsageError(f"micro_batch={at_most}: give at least 1")
    begin, end = share(global_batch, rank, world_size)
    size = end - begin
    largest_share = -(-global_batch // world_size)
    count = -(-largest_share // at_most)
    divisions = []
    for number in range(count):
        first, last = size * number // count, size * (number + 1) // count
        scale = (last - first) * world_size / global_batch
        divisions.append(Division(first, max(last, first + 1), scale))
    return tuple(divisions)
