"""Reads the batches of a job from a dataset with an index, through torch's DataLoader.

`keepstep.elastic.data.order` determines their order. A position in the data is a number of
global batches, and means the same samples for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from keepstep.elastic.data.datasets import Dataset
from keepstep.elastic.data.order import DataOrder, share
from keepstep.elastic.data.sample_randomness import kept_generators, seeded
from keepstep.elastic.errors import UsageError

T = TypeVar("T")
_END = object()

# `Batches` gives these arguments of the loader itself.
_OWN_ARGUMENTS = frozenset(
    {
        "batch_sampler", "batch_size", "collate_fn", "dataset", "drop_last", "generator",
        "num_workers", "sampler", "shuffle",
    }
)  # fmt: skip


class Batches(Generic[T]):
    """One pass over a dataset in the job's order; arguments as for `Job.batches`.

    Raises:
        UsageError: an argument is not possible.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        order: DataOrder,
        collate: Callable[[list[T]], Any] | None,
        workers: int,
        loader_options: Mapping[str, Any],
    ) -> None:
        taken = sorted(_OWN_ARGUMENTS & loader_options.keys())
        if taken:
            raise UsageError(
                f"loader_options={{{taken[0]!r}: ...}}: job.batches sets it; its own arguments are "
                "global_batch, shuffle, collate and workers"
            )
        self._dataset = dataset
        self._order = order
        self._collate = collate
        self._workers = workers
        self._loader_options = loader_options

    def loss_scale(self, rank: int, world_size: int) -> float:
        """Return the weight of this rank's mean loss that keeps the average over ranks exact."""
        return self._order.loss_scale(rank, world_size)

    def from_position(self, first: int, end: int, rank: int, world_size: int) -> Iterator[Any]:
        """Return an iterator over the rank's shares of global batches `first` to `end - 1`.

        Raises:
            UsageError: the global batch is smaller than `world_size`.
        """
        # Raises for impossible sizes before any loader process starts.
        self._order.loss_scale(rank, world_size)
        loader: DataLoader[Any] = DataLoader(
            seeded(self._dataset, self._order.key),  # type: ignore[arg-type]
            batch_sampler=_RankBatches(self._order, first, end, rank, world_size),
            collate_fn=self._collate,
            num_workers=self._workers,
            # By default the loader draws from the global generator, whose state is training state.
            generator=torch.Generator().manual_seed(self._order.key),
            **self._loader_options,
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
