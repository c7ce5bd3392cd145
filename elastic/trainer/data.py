"""Reads the batches of a job through torch's DataLoader.

`keepstep.elastic.trainer.data_order` determines their order. A position in the data is a number of
global batches, and means the same samples for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from keepstep.elastic.trainer.data_order import DataOrder

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dataset(Protocol[T_co]):
    """A map-style dataset: `len(dataset)` samples, `dataset[i]`."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> T_co:
        """Return one sample."""
        ...


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of a job: completed optimizer steps, and global batches consumed."""

    step: int = 0
    batch: int = 0


class Batches(Generic[T]):
    """One pass over a dataset in the job's order; arguments as for `Job.batches`."""

    def __init__(
        self,
        dataset: Dataset[T],
        global_batch: int,
        seed: int,
        shuffle: bool,
        collate: Callable[[list[T]], Any] | None,
        workers: int,
    ) -> None:
        self._dataset = dataset
        self._order = DataOrder(len(dataset), global_batch, seed=seed, shuffle=shuffle)
        self._collate = collate
        self._workers = workers

    @property
    def per_epoch(self) -> int:
        """Number of global batches in one epoch."""
        return self._order.steps_per_epoch

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
            self._dataset,  # type: ignore[arg-type]
            batch_sampler=_RankBatches(self._order, first, end, rank, world_size),
            collate_fn=self._collate,
            num_workers=self._workers,
            # By default the loader draws from the global generator, whose state is training state.
            generator=torch.Generator().manual_seed(self._order.seed + first),
        )
        return iter(loader)


class _RankBatches:
    def __init__(self, order: DataOrder, first: int, end: int, rank: int, world_size: int) -> None:
        self._order = order
        self._steps = range(first, end)
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            yield list(self._order.local_indices(step, self._rank, self._world_size))
