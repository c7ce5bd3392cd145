"""Yields one rank's share of the indices of each global batch, for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keepstep.elastic.data.order import DataOrder


class RankBatches:
    """A batch sampler whose order does not depend on the number of ranks.

    Args:
        order: of the samples.
        epochs: number of passes through the dataset.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        consumed: returns how many global batches of all these epochs are consumed.
        on_resume: called when an iteration begins within an epoch, once the loader has drawn the
            random numbers that it draws for each iteration.

    Raises:
        UsageError: the global batch is smaller than `world_size`.
    """

    def __init__(
        self,
        order: DataOrder,
        epochs: int,
        rank: int,
        world_size: int,
        *,
        consumed: Callable[[], int],
        on_resume: Callable[[], None],
    ) -> None:
        self.loss_scale = order.loss_scale(rank, world_size)
        """Factor for this rank's mean loss that keeps the average over ranks exact."""
        self._order = order
        self._epochs = epochs
        self._consumed = consumed
        self._on_resume = on_resume
        self._rank = rank
        self._world_size = world_size

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of, from 0; the number of epochs after the last one."""
        return max(0, self._consumed()) // self._order.steps_per_epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the epoch that the position is in."""
        first = max(0, self._consumed())
        end = min(self.epoch + 1, self._epochs) * self._order.steps_per_epoch
        if first % self._order.steps_per_epoch:
            self._on_resume()
        for step in range(first, end):
            yield list(self._order.local_indices(step, self._rank, self._world_size))
