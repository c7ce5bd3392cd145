"""Reads the batches of a job from a dataset with an index, through torch's DataLoader.

`keepstep.elastic.data.order` determines their order. A position in the data is a number of
global batches, and means the same samples for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from keepstep.elastic.data.collation import Collate, ShareCollate, check_loader_options
from keepstep.elastic.data.datasets import Dataset
from keepstep.elastic.data.loader_workers import with_prepared_workers
from keepstep.elastic.data.micro_batches import Division
from keepstep.elastic.data.order import DataOrder, share
from keepstep.elastic.data.sample_randomness import kept_generators, seeded

T = TypeVar("T")
_END = object()


class Batches(Generic[T]):
    """One pass over a dataset in the job's order; arguments as for `Job.batches`.

    Raises:
        UsageError: an argument is not possible.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        order: DataOrder,
        collate: Collate[T] | None,
        workers: int,
        loader_options: Mapping[str, Any],
    ) -> None:
        check_loader_options(loader_options)
        self._dataset = dataset
        self._order = order
        self._collate = collate
        self._workers = workers
        self._loader_options = loader_options

    def loss_scale(self, rank: int, world_size: int) -> float:
        """Return the weight of this rank's mean loss that keeps the average over ranks exact."""
        return self._order.loss_scale(rank, world_size)

    def from_position(
        self,
        first: int,
        end: int,
        rank: int,
        world_size: int,
        divisions: tuple[Division, ...] | None = None,
    ) -> Iterator[Any]:
        """Return an iterator over the rank's shares of global batches `first` to `end - 1`.

        Args:
            first: number of batches of the pass that were consumed.
            end: number of batches of the pass.
            rank: data-parallel rank.
            world_size: number of data-parallel ranks.
            divisions: the rank's micro-batches, if it is to have any.

        Raises:
            UsageError: the global batch is smaller than `world_size`.
        """
        # Raises for impossible sizes before any loader process starts.
        self._order.loss_scale(rank, world_size)
        loader: DataLoader[Any] = DataLoader(
            seeded(self._dataset, self._order.key),  # type: ignore[arg-type]
            batch_sampler=_RankBatches(self._order, first, end, rank, world_size),
            collate_fn=ShareCollate(self._collate, divisions),
            num_workers=self._workers,
            # By default the loader draws from the global generator, whose state is training state.
            generator=torch.Generator().manual_seed(self._order.key),
            **with_prepared_workers(self._loader_options),
        )
        return iter(loader) if self._workers else _without_drawing(iter(loader))


def _without_drawing(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches that are read in this process, and leave its generators as they are."""
    while True:
        with kept_generators():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


class _RankBatches:
    """Yields the rank's share of each batch: numbers of samples in the pass, and indices."""

    def __init__(self, order: DataOrder, first: int, end: int, rank: int, world_size: int) -> None:
        self._order = order
        self._steps = range(first, end)
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        begin, _ = share(self._order.global_batch, self._rank, self._world_size)
        for step in self._steps:
            indices = self._order.local_indices(step, self._rank, self._world_size)
            yield list(enumerate(indices, step * self._order.global_batch + begin))
