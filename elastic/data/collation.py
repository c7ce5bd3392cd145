"""Collates a rank's samples into batches, or lists of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.utils.data import default_collate

from keepstep.elastic.data.micro_batches import Division, MicroBatch
from keepstep.elastic.errors import UsageError

T = TypeVar("T")

Collate = Callable[[list[T]], Any]

# `Job.batches` gives these arguments of the loader itself.
_OWN_ARGUMENTS = frozenset(
    {
        "batch_sampler", "batch_size", "collate_fn", "dataset", "drop_last", "generator",
        "in_order", "num_workers", "sampler", "shuffle",
    }
)  # fmt: skip


class ShareCollate(Generic[T]):
    """Collates a rank's share of a global batch; loader processes receive it.

    Args:
        collate: makes a batch from samples; None: as torch's DataLoader does.
        divisions: the micro-batches; None: the share is one batch.
    """

    def __init__(
        self, collate: Collate[T] | None, divisions: Sequence[Division] | None = None
    ) -> None:
        self._collate = collate or default_collate
        self._divisions = divisions

    def __call__(self, samples: list[T]) -> Any:
        """Return the batch, or the list of micro-batches."""
        try:
            return self._collated(samples)
        except StopIteration as stop:
            raise ended_early("collate") from stop

    def _collated(self, samples: list[T]) -> Any:
        if self._divisions is None:
            return self._collate(samples)
        return [
            MicroBatch(
                self._collate(samples[division.begin : division.end]),
                division.loss_scale,
                number == len(self._divisions),
            )
            for number, division in enumerate(self._divisions, 1)
        ]


def ended_early(what: str) -> RuntimeError:
    """Return the error for a user's function that raised StopIteration.

    A loader takes that exception for the end of the data.
    """
    return RuntimeError(
        f"{what} raised StopIteration, as next() does where an iterator has no more. It would have "
        "ended the loop over the data: catch it there, or give next() a default"
    )


def check_loader_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of torch's DataLoader that `Job.batches` sets itself.

    Raises:
        UsageError: there is one.
    """
    taken = sorted(_OWN_ARGUMENTS & options.keys())
    if taken:
        raise UsageError(
            f"loader_options={{{taken[0]!r}: ...}}: job.batches sets it; its own arguments are "
            "global_batch, shuffle, collate and workers"
        )
