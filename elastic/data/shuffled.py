"""Shuffles samples of sources that are read in order."""

from __future__ import annotations

from typing import Generic, TypeVar

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.datasets import PartitionReader
from keepstep.elastic.data.order import permute
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.sources import AnySource, as_source
from keepstep.elastic.errors import UsageError

T = TypeVar("T")


class Shuffled(Generic[T]):
    """A source whose samples are permuted within blocks of each partition, by the job's seed.

    A partition holds one block in memory. A resumed job reads the block that it was in again.

    Args:
        source: a dataset with an index, an iterable, or another source.
        block: samples of a partition that are permuted among each other.
    """

    def __init__(self, source: AnySource[T], block: int) -> None:
        if block < 1:
            raise UsageError(f"Shuffled(block={block}): give at least 1")
        self._source = as_source(source)
        self._block = block

    def most_partitions(self) -> int | None:
        """Return the source's number."""
        return self._source.most_partitions()

    def open_partition(self, partition: Partition, state: Json) -> _ShuffledReader[T]:
        """See `Source`.

        Raises:
            UsageError: the state is that of blocks of another size.
        """
        if state is None:
            state = {"size": self._block, "before": None, "block": 0, "given": 0}
        if state["size"] != self._block:
            raise UsageError(
                f"Shuffled(block={self._block}): the stored position is one in blocks of "
                f"{state['size']}; give that, or begin a new pass"
            )
        reader = self._source.open_partition(partition, state["before"])
        return _ShuffledReader(reader, partition, state)


class _ShuffledReader(Generic[T]):
    """Keeps the current block, and the source's position before it."""

    def __init__(self, reader: PartitionReader[T], partition: Partition, state: Json) -> None:
        self._reader = reader
        self._partition = partition
        self._size, self._before = state["size"], state["before"]
        self._block, self._given = state["block"], state["given"]
        self._samples: list[T] = []

    def read(self) -> T:
        if not self._samples:
            # The first block, the next one, or the one that a resumed reader was in.
            self._samples = [self._reader.read() for _ in range(self._size)]
        place = self._given
        if self._partition.shuffle:
            place = permute(place, self._size, self._partition.seed(self._block))
        sample: T = self._samples[place]
        self._given += 1
        if self._given == self._size:
            self._before = self._reader.state()
            self._samples, self._given, self._block = [], 0, self._block + 1
        return sample

    def state(self) -> Json:
        return {
            "size": self._size,
            "before": self._before,
            "block": self._block,
            "given": self._given,
        }
