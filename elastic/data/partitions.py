"""Divides global batches among a stream's partitions, and partitions among ranks. Pure.

A stream is read in partitions, each in order and by itself. Each partition gives the samples of the
same places of every global batch. Their number follows from the stream and the global batch alone.
So the order of samples depends neither on the number of ranks nor on that of loader processes:
these only determine who reads which partitions. As in Kafka, a position is kept for each partition
and not for its reader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from keepstep.elastic.data.order import mix, share


@dataclass(frozen=True, slots=True)
class Partitioning:
    """`count` partitions, each giving at least one of `global_batch` samples."""

    global_batch: int
    count: int

    def places(self, partition: int) -> range:
        """Return the places in each global batch that a partition's samples take."""
        return range(*share(self.global_batch, partition, self.count))

    def of_rank(self, rank: int, world_size: int) -> range:
        """Return the partitions that give samples of a rank's share, at the ends perhaps in part.

        Raises:
            UsageError: there are more ranks than samples in a batch.
        """
        begin, end = share(self.global_batch, rank, world_size)
        return range(self._partition_at(begin), self._partition_at(end - 1) + 1)

    def _partition_at(self, place: int) -> int:
        return ((place + 1) * self.count - 1) // self.global_batch


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a source, and the values that determine its order.

    Attributes:
        number: from 0.
        count: how many there are.
        key: of the source's randomness, 64 bits; the same for all of its partitions.
        shuffle: whether a source that knows its samples or shards beforehand permutes them.
    """

    number: int
    count: int
    key: int
    shuffle: bool

    def of_source(self, number: int) -> Self:
        """Return the same partition of one of several sources."""
        return replace(self, key=mix(self.key, number + 1))

    def seed(self, sample: int) -> int:
        """Return the seed of a sample, by its number in the partition."""
        return mix(mix(self.key, self.number), sample)
