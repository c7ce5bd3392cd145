"""One pass of a job over its data, which is a dataset with an index or a stream of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from keepstep.checkpoint.layout.boxes import Json
from keepstep.elastic.data.batches import Batches
from keepstep.elastic.data.datasets import Dataset, Stream, is_stream
from keepstep.elastic.data.order import DataOrder, pass_key
from keepstep.elastic.data.position import Position
from keepstep.elastic.data.stream_batches import StreamBatches
from keepstep.elastic.errors import UsageError

T = TypeVar("T")


class DataPass(Generic[T]):
    """The global batches `begin` to `end - 1` of a job.

    Args:
        number: how many passes were begun before.
        begin: how many global batches they have.
        seed: the job's seed.
        dataset, global_batch, epochs, steps, shuffle, collate, workers, loader_options: as for
            `Job.batches`.

    Raises:
        UsageError: the arguments do not fit the dataset, or the stream.
    """

    def __init__(
        self,
        number: int,
        begin: int,
        seed: int,
        dataset: Dataset[T] | Stream[T],
        global_batch: int,
        *,
        epochs: int,
        steps: int | None,
        shuffle: bool,
        collate: Callable[[list[T]], Any] | None,
        workers: int,
        loader_options: Mapping[str, Any] | None,
    ) -> None:
        self._batches: Batches[T] | StreamBatches[T]
        if is_stream(dataset):
            if steps is None or workers or loader_options:
                raise UsageError(
                    "a dataset that is only iterated has no length and is read in this process: "
                    "give steps=, and neither workers nor loader_options"
                )
            key = pass_key(seed, number)
            self._batches, length = StreamBatches(dataset, global_batch, key, collate), steps
        else:
            indexed = cast("Dataset[T]", dataset)
            order = DataOrder(
                len(indexed), global_batch, seed=seed, shuffle=shuffle, pass_number=number
            )
            self._batches = Batches(indexed, order, collate, workers, loader_options or {})
            length = steps if steps is not None else epochs * order.steps_per_epoch
        self.begin = begin
        self.end = begin + length

    def from_position(self, position: Position, rank: int, world_size: int) -> Iterator[Any]:
        """Return an iterator over a rank's shares of the batches from a position to the end.

        Args:
            position: not before `begin`.
            rank: data-parallel rank.
            world_size: number of data-parallel ranks.

        Raises:
            UsageError: the global batch is smaller than `world_size`, or than the stream.
        """
        first, end = position.batch - self.begin, self.end - self.begin
        if isinstance(self._batches, StreamBatches):
            return self._batches.from_position(first, end, rank, world_size, position.stream)
        return self._batches.from_position(first, end, rank, world_size)

    def loss_scale(self, rank: int, world_size: int) -> float:
        """Return the weight of a rank's mean loss that keeps the average over ranks exact."""
        return self._batches.loss_scale(rank, world_size)

    def stream_state(self, position: Position) -> Json:
        """Return where a stream of samples is at a position; None without one that can tell."""
        if isinstance(self._batches, StreamBatches):
            state = self._batches.state(position.batch - self.begin)
            if state is not None:
                return state
        # It was not read since it was restored.
        return position.stream
