"""Reads one pass of a job over its data: a dataset with an index, or a source read in order."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from keepstep.elastic.data.batches import Batches
from keepstep.elastic.data.collation import Collate
from keepstep.elastic.data.datasets import Dataset, Source, Stream, is_stream
from keepstep.elastic.data.micro_batches import divide
from keepstep.elastic.data.order import DataOrder, pass_key
from keepstep.elastic.data.partition_batches import PartitionBatches
from keepstep.elastic.data.position import IndexedPass, Position, StreamPosition
from keepstep.elastic.data.sources import as_source
from keepstep.elastic.errors import UsageError

T = TypeVar("T")


class DataPass(Generic[T]):
    """The global batches `begin` to `end - 1` of a job.

    Args:
        number: number of earlier passes.
        begin: number of their global batches.
        seed: the job's seed.
        dataset, global_batch, micro_batch, epochs, steps, shuffle, collate, workers,
            loader_options: as for `Job.batches`.

    Raises:
        UsageError: the arguments do not fit the dataset, or the source.
    """

    def __init__(
        self,
        number: int,
        begin: int,
        seed: int,
        dataset: Dataset[T] | Stream[T] | Source[T],
        global_batch: int,
        *,
        micro_batch: int | None = None,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = True,
        collate: Collate[T] | None = None,
        workers: int = 0,
        loader_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._batches: Batches[T] | PartitionBatches[T]
        self._indexed: IndexedPass | None = None
        if isinstance(dataset, Source) or is_stream(dataset):
            if steps is None:
                raise UsageError(
                    "a stream has no length that is known beforehand: give job.batches(steps=...)"
                )
            self._batches = PartitionBatches(
                as_source(dataset),
                global_batch,
                begin,
                pass_key(seed, number),
                shuffle=shuffle,
                collate=collate,
                workers=workers,
                loader_options=loader_options or {},
            )
            length = steps
        else:
            indexed = cast("Dataset[T]", dataset)
            order = DataOrder(
                len(indexed), global_batch, seed=seed, shuffle=shuffle, pass_number=number
            )
            self._batches = Batches(indexed, order, collate, workers, loader_options or {})
            length = steps if steps is not None else epochs * order.steps_per_epoch
            # It is stored as JSON, which has no place for NumPy's integers.
            self._indexed = IndexedPass(
                begin=operator.index(begin),
                end=operator.index(begin + length),
                global_batch=operator.index(global_batch),
                samples=operator.index(order.samples),
            )
        if length < 1:
            raise UsageError(
                f"a pass of {length} steps trains nothing: give steps or epochs of 1 or more"
            )
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self.begin = begin
        self.end = begin + length

    def from_position(self, position: Position, rank: int, world_size: int) -> Iterator[Any]:
        """Return an iterator over a rank's shares of the batches from a position to the end.

        Args:
            position: not before `begin`.
            rank: data-parallel rank.
            world_size: number of data-parallel ranks.

        Raises:
            UsageError: the global batch is smaller than `world_size`, `micro_batch` is not
                positive, or the position is that of another stream.
        """
        first, end = position.batch - self.begin, self.end - self.begin
        divisions = (
            None
            if self._micro_batch is None
            else divide(self._global_batch, self._micro_batch, rank, world_size)
        )
        shares = (
            self._batches.from_position(first, end, rank, world_size, divisions, position.stream)
            if isinstance(self._batches, PartitionBatches)
            else self._batches.from_position(first, end, rank, world_size, divisions)
        )
        return _all_of(shares, end - first)

    def loss_scale(self, rank: int, world_size: int) -> float:
        """Return the weight of a rank's mean loss that keeps the average over ranks exact."""
        return self._batches.loss_scale(rank, world_size)

    def check_continues(self, position: Position) -> None:
        """Check that a restored position means the same samples as when it was stored.

        A stream's identity is checked when it is read.

        Raises:
            UsageError: the position is within this pass, which had another dataset or global batch.
        """
        if self._indexed is not None and position.indexed_pass is not None:
            self._indexed.check_continues(position.indexed_pass, position.batch)

    def resume(self, position: Position) -> None:
        """Replace the position up to which a stream was read by one that was restored.

        Other partitions may be this rank's from now on.
        """
        if isinstance(self._batches, PartitionBatches):
            self._batches.resume(position.stream)

    def located(self, position: Position) -> Position:
        """Return a position with the facts about its data that a job which resumes there needs."""
        # A script that has not reached the restored pass yet is in another one.
        is_own = self.begin <= position.batch <= self.end
        return replace(
            position,
            stream=self.stream_position(position),
            indexed_pass=self._indexed if is_own else position.indexed_pass,
        )

    def stream_position(self, position: Position) -> StreamPosition | None:
        """Return where a stream is at a position; None for a dataset with an index."""
        if isinstance(self._batches, PartitionBatches):
            reached = self._batches.position(position.batch)
            if reached is not None:
                return reached
        # It was not read since it was restored.
        return position.stream


def _all_of(shares: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield `count` shares.

    Raises:
        RuntimeError: the loader ends earlier; the position would then never reach the pass's end.
    """
    for number in range(count):
        try:
            share = next(shares)
        except StopIteration as stop:
            raise RuntimeError(
                f"the data loader ended {count - number} global batches before the end of the "
                "pass: something that it calls, such as worker_init_fn, has raised StopIteration, "
                "or it was changed"
            ) from stop
        yield share
