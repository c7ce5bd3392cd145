"""Reads the batches of a job from a source, whose partitions are divided among ranks.

A rank, and in it each loader process, reads the partitions that give samples of its share of the
global batches, and no others. Where a share ends within a partition, two ranks read that one. Each
batch carries the positions of its partitions after it, since loader processes are ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.collation import (
    Collate,
    ShareCollate,
    check_loader_options,
    ended_early,
)
from keepstep.elastic.data.datasets import PartitionReader, Source
from keepstep.elastic.data.loader_workers import with_prepared_workers
from keepstep.elastic.data.micro_batches import Division
from keepstep.elastic.data.order import loss_scale, mix, share
from keepstep.elastic.data.partitions import Partition, Partitioning
from keepstep.elastic.data.position import StreamPosition
from keepstep.elastic.data.sample_randomness import kept_generators, seed_generators
from keepstep.elastic.errors import UsageError
from keepstep.torch_internals import pin_memory

log = logging.getLogger("keepstep")

T = TypeVar("T")


States = dict[int, Json]
"""The position in each partition, by its number."""


class ReadShare(NamedTuple):
    """The part of a rank's share of a global batch that one loader process, or this one, has read.

    Attributes:
        content: the samples in their order; for a whole share, the batch that `collate` made.
        states: by partition, its position afterwards. For this process it is a function that
            returns the position until the next part is read.
    """

    content: Any
    states: States | Callable[[], States]


class PartitionBatches(Generic[T]):
    """One pass of `Job.batches` over a source.

    Args:
        source: what to read.
        global_batch: samples per step over all ranks.
        begin: number of global batches of earlier passes.
        key: seed of the pass, 64 bits.
        shuffle, collate, workers, loader_options: as for `Job.batches`.

    Raises:
        UsageError: an argument is not possible.
    """

    def __init__(
        self,
        source: Source[T],
        global_batch: int,
        begin: int,
        key: int,
        *,
        shuffle: bool,
        collate: Collate[T] | None,
        workers: int,
        loader_options: Mapping[str, Any],
    ) -> None:
        if global_batch < 1:
            raise UsageError(f"global_batch={global_batch}: give at least 1")
        check_loader_options(loader_options)
        most = source.most_partitions()
        self._partitioning = Partitioning(
            global_batch, global_batch if most is None else min(global_batch, most)
        )
        self._source = source
        self._begin = begin
        self._key = key
        self._shuffle = shuffle
        self._collate = collate
        self._workers = workers
        self._loader_options = {
            name: value for name, value in loader_options.items() if name != "pin_memory"
        }
        self._pins = bool(loader_options.get("pin_memory")) and torch.accelerator.is_available()
        self._position: StreamPosition | None = None
        # The part read last, until its position is asked for: a loader's state may cost much.
        self._last: tuple[int, list[States | Callable[[], States]]] | None = None
        self._has_warned = False

    def position(self, batch: int) -> StreamPosition | None:
        """Return the source's position after `batch` batches of the job; None if unknown."""
        if self._last is not None and self._last[0] == batch:
            with kept_generators():
                self._position = self._position_after(*self._last)
            self._last = None
        reached = self._position
        return reached if reached is not None and reached.batch == batch else None

    def _position_after(
        self, batch: int, read: list[States | Callable[[], States]]
    ) -> StreamPosition:
        states: States = {}
        for of_piece in read:
            states.update(of_piece() if callable(of_piece) else of_piece)
        return StreamPosition(
            begin=self._begin, batch=batch, partitioning=self._partitioning, states=states
        )

    def resume(self, stored: StreamPosition | None) -> None:
        """Make `position` return a position that was restored, until a batch is read."""
        self._position, self._last = stored, None

    def loss_scale(self, rank: int, world_size: int) -> float:
        """Return the weight of this rank's mean loss that keeps the average over ranks exact."""
        return loss_scale(self._partitioning.global_batch, rank, world_size)

    def from_position(
        self,
        first: int,
        end: int,
        rank: int,
        world_size: int,
        divisions: tuple[Division, ...] | None = None,
        stored: StreamPosition | None = None,
    ) -> Iterator[Any]:
        """Return an iterator over the rank's shares of global batches `first` to `end - 1`.

        Args:
            first: number of batches of the pass that were consumed.
            end: number of batches of the pass.
            rank: data-parallel rank.
            world_size: number of data-parallel ranks.
            divisions: the rank's micro-batches, if it is to have any.
            stored: the source's position, there or earlier; None: begin, and read up to the
                position.

        Raises:
            UsageError: the global batch is smaller than `world_size`, or the stored position is
                that of another division into partitions.
        """
        places = range(*share(self._partitioning.global_batch, rank, world_size))
        partitions = self._partitioning.of_rank(rank, world_size)
        if self._partitioning.count < world_size and rank == 0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "partitions of the stream: %d, fewer than the %d data-parallel ranks, so that "
                "several ranks read the same ones; divide its sources into more shards",
                self._partitioning.count, world_size,
            )  # fmt: skip
        start, states = self._resumed(first, stored)
        if start < first:
            log.info("reading past %d global batches of the stream", first - start)
        shares: RankShares[T] = RankShares(
            self._source, self._partitioning, partitions, places, states,
            range(start, end), first, self._key, self._shuffle,
            ShareCollate(self._collate, divisions),
        )  # fmt: skip
        return self._batches(shares)

    def _resumed(self, first: int, stored: StreamPosition | None) -> tuple[int, Mapping[int, Json]]:
        """Return the batch of the pass at which reading begins, and the states there."""
        if stored is None or stored.begin != self._begin or stored.batch - self._begin > first:
            return 0, {}
        if stored.partitioning != self._partitioning:
            raise UsageError(
                f"the stream was read in {stored.partitioning.count} partitions with "
                f"global_batch={stored.partitioning.global_batch}, and is now to be read in "
                f"{self._partitioning.count} with global_batch={self._partitioning.global_batch}, "
                "so its position means other samples; give the same sources and global_batch"
            )
        return stored.batch - self._begin, stored.states

    def _batches(self, shares: RankShares[T]) -> Iterator[Any]:
        workers = min(self._workers, len(shares.partitions))
        with kept_generators():
            loader: DataLoader[ReadShare] = DataLoader(
                shares,
                batch_size=None,
                collate_fn=_as_it_is,  # type: ignore[arg-type]
                num_workers=workers,
                # By default the loader draws from the global generator, which is training state.
                generator=torch.Generator().manual_seed(self._key),
                **with_prepared_workers(self._loader_options),
            )
            pieces = iter(loader)
        for batch in range(shares.first, shares.batches.stop):
            # Reading can fail only within a batch.
            self._position = self._last = None
            with kept_generators():
                read = [next(pieces) for _ in range(max(1, workers))]
                collated = (
                    read[0].content
                    if len(read) == 1
                    else shares.collated(batch, [item for piece in read for item in piece.content])
                )
            if self._pins:
                collated = pin_memory(collated)
            self._last = self._begin + batch + 1, [piece.states for piece in read]
            yield collated


@dataclass(frozen=True)
class RankShares(IterableDataset[ReadShare], Generic[T]):
    """Yields a rank's share of each global batch, or a loader process's part of it.

    Attributes:
        source: the source to read.
        partitioning: how it is divided.
        partitions: those that have samples of the share.
        places: the places in each global batch that are the rank's.
        states: where the partitions are before the first of `batches`; none: at their beginning.
        batches: which global batches of the pass are read.
        first: the first of them that is yielded.
        key: of the pass's randomness.
        shuffle: as for `Job.batches`.
        collate: makes a batch from the samples of a share.
    """

    source: Source[T]
    partitioning: Partitioning
    partitions: range
    places: range
    states: Mapping[int, Json]
    batches: range
    first: int
    key: int
    shuffle: bool
    collate: ShareCollate[T]

    def __iter__(self) -> Iterator[ReadShare]:
        """Yield the parts that this process reads."""
        worker = get_worker_info()
        return self.pieces(worker.id, worker.num_workers) if worker else self.pieces(0, 1)

    def pieces(self, number: int, count: int) -> Iterator[ReadShare]:
        """Yield part `number` of `count` of each share."""
        own = self.partitions[slice(*share(len(self.partitions), number, count))]
        readers = {
            partition: self.source.open_partition(
                Partition(partition, self.partitioning.count, self.key, self.shuffle),
                self.states.get(partition),
            )
            for partition in own
        }
        for batch in self.batches:
            samples = [
                sample
                for partition in own
                for place in self.partitioning.places(partition)
                # Samples of other ranks are read as well: the partition stays in step.
                for sample in [_read(readers[partition], partition)]
                if place in self.places
            ]
            if batch >= self.first:
                content = self.collated(batch, samples) if count == 1 else samples
                states = partial(_states, readers)
                yield ReadShare(content, states if get_worker_info() is None else states())

    def collated(self, batch: int, samples: list[T]) -> Any:
        """Return the batch that `collate` makes from the whole share of a global batch."""
        number = batch * self.partitioning.global_batch + self.places.start
        seed_generators(mix(self.key, number))
        return self.collate(samples)


def _read(reader: PartitionReader[T], partition: int) -> T:
    try:
        return reader.read()
    except StopIteration as stop:
        raise ended_early(f"the source of partition {partition}") from stop


def _states(readers: Mapping[int, PartitionReader[Any]]) -> States:
    return {partition: reader.state() for partition, reader in readers.items()}


def _as_it_is(piece: ReadShare) -> ReadShare:
    return piece
