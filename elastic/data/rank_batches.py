"""Yields one rank's share of the indices of each global batch, for torch's DataLoader. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keepstep.elastic.data.order import DataOrder


class RankBatches:
    """A batch sampler whose order does not depend on the number of ranks.

    Each iteration goes on to the end of the epoch that it begins in.

    Args:
        order: of the samples. An epoch's last, incomplete batch is left out.
        first: returns the number of the batch that is read next, counted over all epochs.
        share: returns the data-parallel rank, and the number of them.
        epochs: number of epochs after which nothing is yielded; None: no limit.
        on_resume: called when an iteration begins within an epoch, once the loader has drawn the
            random numbers that it draws for each iteration.
    """

    def __init__(
        self,
        order: DataOrder,
        first: Callable[[], int],
        share: Callable[[], tuple[int, int]],
        *,
        epochs: int | None = None,
        on_resume: Callable[[], None] = lambda: None,
    ) -> None:
        self._order = order
        self._first = first
        self._share = share
        self._epochs = epochs
        self._on_resume = on_resume

    @property
    def loss_scale(self) -> float:
        """Factor for this rank's mean loss that keeps the average over ranks exact."""
        return self._order.loss_scale(*self._share())

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of, from 0; the number of epochs after the last one."""
        return max(0, self._first()) // self._order.steps_per_epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rest of the epoch that the position is in."""
        first, epoch = max(0, self._first()), self.epoch
        if epoch == self._epochs:
            return
        if first % len(self):
            self._on_resume()
        for batch in range(first, (epoch + 1) * len(self)):
            yield list(self._order.local_indices(batch, *self._share()))
