"""Reads streams that lie in shards, such as files, each readable from an offset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.elastic.data.order import mix, permute, share
from keepstep.elastic.data.partitions import Partition
from keepstep.elastic.data.sample_randomness import seed_generators
from keepstep.elastic.errors import UsageError

S = TypeVar("S")
T = TypeVar("T")
_END = object()

Read = Callable[[S, Any], Iterable[tuple[T, Any]]]


class ShardedStream(Generic[S, T]):
    """A stream of the samples of several shards. A shard is read by one partition at a time.

    Each partition reads its share of the shards, one shard after another, and then those of the
    next epoch; with `shuffle` each epoch has an order of its own. No two partitions read the same
    shard in an epoch. Give shards of about equal size: a partition with less to read begins its
    next epoch sooner.

    Args:
        shards: their names, such as paths; the same on all ranks.
        read: reads a shard from an offset: yields each sample with the offset of the next one. An
            offset is 0 at the shard's beginning; others are JSON, such as a position in the file.
        partitions: greatest number of shards that all ranks together read at a time. Default: one
            for each sample of a global batch. The order of the samples depends on it.
    """

    def __init__(
        self, shards: Sequence[S], read: Read[S, T], *, partitions: int | None = None
    ) -> None:
        if not shards:
            raise UsageError("ShardedStream: there are no shards; give at least one")
        if partitions is not None and partitions < 1:
            raise UsageError(f"ShardedStream(partitions={partitions}): give at least 1, or None")
        self._shards = shards
        self._read = read
        self._partitions = partitions

    def most_partitions(self) -> int:
        """Return the number of shards, or `partitions`."""
        return min(len(self._shards), self._partitions or len(self._shards))

    def open_partition(self, partition: Partition, state: Json) -> _ShardReader[S, T]:
        """See `Source`.

        Raises:
            UsageError: the state is that of another number of shards.
        """
        if state is not None and state["shards"] != len(self._shards):
            raise UsageError(
                f"the stream had {state['shards']} shards and now has {len(self._shards)}, so its "
                "position means other samples; give the same shards, and read new ones in a new "
                "pass"
            )
        return _ShardReader(self._shards, self._read, partition, state)


class _ShardReader(Generic[S, T]):
    def __init__(
        self, shards: Sequence[S], read: Read[S, T], partition: Partition, state: Json
    ) -> None:
        self._shards = shards
        self._read_shard = read
        self._partition = partition
        self._own = range(*share(len(shards), partition.number, partition.count))
        if state is None:
            self._epoch, self._place, self._offset, self._read = 0, 0, 0, 0
        else:
            self._epoch, self._place = state["epoch"], state["place"]
            self._offset, self._read = state["offset"], state["read"]
        self._samples: Iterator[tuple[T, Any]] | None = None

    def read(self) -> T:
        # The random numbers of `read` follow from the sample alone.
        seed_generators(self._partition.seed(self._read))
        read_shards = 0
        while True:
            if self._samples is None:
                self._samples = iter(self._read_shard(self._shard(), self._offset))
            item: Any = next(self._samples, _END)
            if item is not _END:
                break
            if read_shards > len(self._own):
                raise UsageError(
                    f"the {len(self._own)} shards of partition {self._partition.number} of "
                    f"{self._partition.count} have no samples; leave empty shards out"
                )
            read_shards += 1
            self._begin_next_shard()
        if not isinstance(item, tuple) or len(item) != 2:
            raise UsageError(
                f"ShardedStream: read(shard, offset) yielded a {type(item).__name__}; yield pairs "
                "of a sample and the offset after it"
            )
        sample, self._offset = item
        self._read += 1
        return sample  # type: ignore[no-any-return]

    def state(self) -> Json:
        return {
            "shards": len(self._shards),
            "epoch": self._epoch,
            "place": self._place,
            "offset": self._offset,
            "read": self._read,
        }

    def _shard(self) -> S:
        place = self._own[self._place]
        if self._partition.shuffle:
            place = permute(place, len(self._shards), mix(self._partition.key, self._epoch))
        return self._shards[place]

    def _begin_next_shard(self) -> None:
        self._samples, self._offset, self._place = None, 0, self._place + 1
        if self._place == len(self._own):
            self._place, self._epoch = 0, self._epoch + 1
