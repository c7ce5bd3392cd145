"""Holds a node's snapshots: the buffers, what lies in them, and which of them are kept.

`checkpoint.snapshot.memory.snapshot_table` decides what is kept; this module locks, maps, and
releases the memory that the table no longer names.

Invariant: an arena exists for every buffer of the table, and for no other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from keepstep.checkpoint.errors import MemoryShort, SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import DecodedIndex, Entry, ShardIndex
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.checkpoint.snapshot.memory import snapshot_table
from keepstep.checkpoint.snapshot.memory.client import read_index
from keepstep.checkpoint.snapshot.memory.erasure_group import ShardLocation
from keepstep.checkpoint.snapshot.memory.messages import SealedRanks, ShardBox
from keepstep.checkpoint.snapshot.memory.snapshot_table import SnapshotTable
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.transport import FileRange

# How long one request for a shard that is still being rebuilt waits; the client asks again.
_PENDING_POLL_S = 5.0

# How long memory is waited for that others have taken: less than a client waits for an answer.
_MEMORY_WAIT_S = 20.0
_MEMORY_POLL_S = 0.1

Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBuffer:
    """A buffer that a writer was given.

    `descriptor` is a duplicate that the receiver closes; None if the writer has mapped the buffer
    already. `dropped` are those buffers that it has mapped and that are released.
    """

    buffer: int
    capacity: int
    descriptor: int | None
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OwnShard:
    """A shard that one of the node's ranks has sealed; the index ends its `nbytes` bytes."""

    rank: int
    arena: Arena
    index_offset: int
    nbytes: int


@dataclass(slots=True)
class _SealedShard:
    """Where a sealed shard's index lies in its buffer, and the index once it has been needed."""

    index_offset: int
    index_nbytes: int
    index: ShardIndex | None = None
    entries: Mapping[str, tuple[Entry, ...]] = field(default_factory=dict)


class SnapshotMemory:
    """The snapshots of one node. Thread-safe; `close` frees everything.

    Args:
        budget: the node's memory.
        on_retained: called, under the lock, with the snapshots that are still held in any part.
    """

    def __init__(
        self, budget: MemoryBudget, on_retained: Callable[[set[SnapshotId]], None]
    ) -> None:
        self._budget = budget
        self._on_retained = on_retained
        self._changed = threading.Condition()
        self._table = SnapshotTable()
        self._arenas: dict[int, Arena] = {}
        self._shards: dict[tuple[SnapshotId, int], _SealedShard] = {}
        # The boxes that were read last of each rank, and by key: the next ones are often the same.
        self._read: dict[int, tuple[DecodedIndex, Mapping[str, tuple[Entry, ...]]]] = {}
        # Lost nodes' shards that are to be rebuilt here, and the reason if one of them cannot be.
        self._awaited: dict[tuple[SnapshotId, int], str | None] = {}
        self._is_stopping = False

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        with self._changed:
            return self._table.nbytes

    @property
    def committed(self) -> SnapshotId:
        """The newest committed snapshot that the agent has named; nothing older is kept."""
        with self._changed:
            return self._table.committed

    def held_ranks(self, snapshot: SnapshotId) -> tuple[int, ...]:
        """Return whose shards of a snapshot are complete here, rebuilt ones among them."""
        with self._changed:
            return tuple(sorted(rank for held, rank in self._shards if held == snapshot))

    def sealed(self) -> tuple[SealedRanks, ...]:
        """Return which of this node's ranks have sealed each snapshot."""
        with self._changed:
            sealed = self._table.sealed()
        return tuple(
            SealedRanks(snapshot, tuple(sorted(ranks))) for snapshot, ranks in sealed.items()
        )

    def open_generation(self, generation: int) -> None:
        """Accept shards of this generation only, from now on; expect no rebuilt ones of before."""
        with self._changed:
            if generation > self._table.generation:
                self._awaited.clear()
                self._read.clear()
                self._changed.notify_all()
            self._update(lambda table: snapshot_table.open_generation(table, generation))

    def fence(self, generation: int) -> None:
        """Refuse to begin or seal anything in a generation, from now on."""
        self._update(lambda table: snapshot_table.fence(table, generation))

    def begin(
        self,
        snapshot: SnapshotId,
        rank: int,
        nbytes: int,
        mapped: Sequence[int],
        *,
        discard_uncommitted: bool,
    ) -> GivenBuffer:
        """Give a rank a buffer for a snapshot; `mapped` are the buffers that it has mapped.

        Waits a while if memory is short.

        Raises:
            SnapshotUnavailable: see `snapshot_table.begin`.
        """

        def take(left_nbytes: Callable[[], int]) -> GivenBuffer:
            has_buffer = snapshot_table.has_buffer(self._table, nbytes)
            self._table, shard = snapshot_table.begin(
                self._table,
                snapshot,
                rank,
                nbytes,
                0 if has_buffer else left_nbytes(),
                mapped=mapped,
                discard_uncommitted=discard_uncommitted,
            )
            arena = self._arena_of_buffer(shard.buffer, shard.capacity)
            # If it is taken once more, what was known of the rank's first copy holds no longer.
            is_retaken = self._shards.pop((snapshot, rank), None) is not None
            self._release_unused(retaken=snapshot if is_retaken else None)
            return GivenBuffer(
                buffer=shard.buffer,
                capacity=shard.capacity,
                descriptor=None if shard.buffer in mapped else os.dup(arena.descriptor),
                dropped=self._dropped(mapped),
            )

        return self._once_there_is_memory(take, lambda: False)

    def seal(
        self, snapshot: SnapshotId, rank: int, index_offset: int, index_nbytes: int
    ) -> frozenset[int]:
        """Declare a shard complete, whose index lies at this place in its buffer.

        Args:
            snapshot: what the shard is a part of.
            rank: whose part.
            index_offset: where the index begins, in bytes.
            index_nbytes: its size.

        Returns:
            Which of this node's ranks have sealed the snapshot then. However many seal at the same
            time, one call alone returns all ranks.

        Raises:
            SnapshotUnavailable: see `snapshot_table.seal`.
            ValueError: the buffer ends before the index does.
        """
        with self._changed:
            table = snapshot_table.seal(self._table, snapshot, rank)
            if index_offset + index_nbytes > table.shards[snapshot, rank].capacity:
                raise ValueError(f"the index of rank {rank}'s shard lies beyond its buffer's end")
            self._table = table
            self._shards[snapshot, rank] = _SealedShard(index_offset, index_nbytes)
            return table.sealed_ranks(snapshot)

    def abandon(self, snapshot: SnapshotId, rank: int) -> None:
        """Forget a shard that was begun and not sealed, for its writer is gone."""
        self._update(lambda table: snapshot_table.abandon(table, snapshot, rank))

    def discard(self, snapshot: SnapshotId) -> None:
        """Forget a snapshot, for it is damaged."""
        self._update(lambda table: snapshot_table.discard(table, snapshot))

    def commit(self, snapshot: SnapshotId) -> None:
        """Free everything older than a snapshot, unless it is pinned."""
        self._update(lambda table: snapshot_table.commit(table, snapshot))

    def pin(self, snapshot: SnapshotId) -> None:
        """Keep a snapshot until `unpin`. Raises SnapshotUnavailable if nothing of it is held."""
        with self._changed:
            self._table = snapshot_table.pin(self._table, snapshot)

    def unpin(self, snapshot: SnapshotId) -> None:
        """Undo one `pin`."""
        self._update(lambda table: snapshot_table.unpin(table, snapshot))

    @contextmanager
    def pinned(self, snapshot: SnapshotId) -> Iterator[None]:
        """Keep a snapshot while the context lasts. Raises as `pin` does."""
        self.pin(snapshot)
        try:
            yield
        finally:
            self.unpin(snapshot)

    def memory(self, snapshot: SnapshotId, rank: int) -> Arena:
        """Return a sealed shard's memory; the caller has pinned the snapshot while it uses it.

        Raises:
            SnapshotUnavailable: the shard is not held here.
        """
        with self._changed:
            return self._arena(snapshot, rank)

    def open_shard(self, snapshot: SnapshotId, rank: int) -> tuple[int, int]:
        """Return a sealed shard's capacity and a descriptor of its memory, which the caller closes.

        Raises as `memory` does.
        """
        with self._changed:
            arena = self._arena(snapshot, rank)
            return arena.nbytes, os.dup(arena.descriptor)

    def index(self, snapshot: SnapshotId, rank: int) -> ShardIndex:
        """Return what a sealed shard holds. Raises as `memory` does."""
        with self._changed:
            self._read_index(snapshot, rank)
            index = self._shards[snapshot, rank].index
        assert index is not None
        return index

    def index_range(self, snapshot: SnapshotId, rank: int) -> FileRange:
        """Return a sealed shard's encoded index. Raises as `memory` does."""
        with self._changed:
            shard = self._shard(snapshot, rank)
            return self._arena(snapshot, rank).range(shard.index_offset, shard.index_nbytes)

    def find_box(self, snapshot: SnapshotId, wanted: ShardBox) -> tuple[Entry, Arena]:
        """Return the entry that has all of a box, and its memory. Raises as `memory` does.

        Raises:
            ValueError: the box is not in the rank's shard.
        """
        held = (snapshot, wanted.rank)
        with self._changed:
            entries = self._read_index(*held).get(wanted.key, ())
            arena = self._arenas[self._table.shards[held].buffer]
        for entry in entries:
            if wanted.box.is_within(entry.box):
                return entry, arena
        raise ValueError(
            f"rank {wanted.rank}'s shard of step {snapshot.step} does not have the box of "
            f"{wanted.key} at offset {wanted.box.offset}, shape {wanted.box.shape}"
        )

    def own_shards(self, snapshot: SnapshotId) -> tuple[OwnShard, ...]:
        """Return the shards that this node's ranks have sealed of a snapshot, by rank."""
        with self._changed:
            shards = []
            for rank in sorted(self._table.sealed().get(snapshot, ())):
                shard = self._shards[snapshot, rank]
                nbytes = shard.index_offset + shard.index_nbytes
                arena = self._arena(snapshot, rank)
                shards.append(OwnShard(rank, arena, shard.index_offset, nbytes))
            return tuple(shards)

    def expect(self, snapshot: SnapshotId, ranks: Sequence[int]) -> None:
        """Let requests for these ranks' shards wait: they are going to be rebuilt here."""
        with self._changed:
            self._awaited.update({(snapshot, rank): None for rank in ranks})
            self._changed.notify_all()

    def is_pending(self, snapshot: SnapshotId, rank: int) -> bool:
        """Wait a while for a shard that is to be rebuilt here; whether it is still to come.

        Raises:
            SnapshotUnavailable: it cannot be rebuilt.
        """
        key = (snapshot, rank)

        def is_settled() -> bool:
            is_failed = self._awaited.get(key) is not None
            return key in self._shards or is_failed or self._is_stopping

        with self._changed:
            # The client may enter the new generation before this node's agent does: a shard that
            # is not expected yet may be so in a moment.
            if not self._changed.wait_for(is_settled, _PENDING_POLL_S):
                return key in self._awaited
            reason = self._awaited.get(key)
        if reason is not None:
            raise SnapshotUnavailable(reason)
        return False

    def adopt(
        self, snapshot: SnapshotId, rank: int, nbytes: int, is_over: Callable[[], bool]
    ) -> Arena:
        """Return memory for a lost node's shard; waits a while if it is short.

        Args:
            snapshot: what the shard is a part of.
            rank: whose part.
            nbytes: its size.
            is_over: whether the shard is not wanted any more.

        Raises:
            SnapshotUnavailable: see `snapshot_table.adopt`.
        """

        def take(left_nbytes: Callable[[], int]) -> Arena:
            self._table, shard = snapshot_table.adopt(
                self._table, snapshot, rank, nbytes, left_nbytes()
            )
            return self._arena_of_buffer(shard.buffer, shard.capacity)

        return self._once_there_is_memory(take, is_over)

    def complete_adoption(self, snapshot: SnapshotId, location: ShardLocation) -> None:
        """Serve a rebuilt shard from now on."""
        rank = location.rank
        with self._changed:
            self._table = snapshot_table.complete_adoption(self._table, snapshot, rank)
            self._shards[snapshot, rank] = _SealedShard(
                location.index_offset, location.nbytes - location.index_offset
            )
            self._awaited.pop((snapshot, rank), None)
            self._release_unused()
            self._changed.notify_all()

    def fail_adoption(self, snapshot: SnapshotId, rank: int, reason: str) -> None:
        """Refuse requests that wait for a shard: it cannot be rebuilt."""
        with self._changed:
            self._update(lambda table: snapshot_table.abandon(table, snapshot, rank))
            self._awaited[snapshot, rank] = reason
            self._changed.notify_all()

    def abandon_adoption(self, snapshot: SnapshotId, rank: int) -> None:
        """Free the memory of a shard whose rebuild was stopped; another rebuild may follow."""
        self._update(lambda table: snapshot_table.abandon(table, snapshot, rank))

    def is_rebuilt(self, snapshot: SnapshotId, rank: int) -> bool:
        """Whether a lost node's shard is here already, from an earlier rebuild."""
        with self._changed:
            return (snapshot, rank) in self._shards

    def stop(self) -> None:
        """End all waits."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Free all memory. No thread may be using it."""
        with self._changed:
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    def _once_there_is_memory(
        self, take: Callable[[Callable[[], int]], Taken], is_over: Callable[[], bool]
    ) -> Taken:
        """Call what takes memory, with what tells how much is left, until that suffices.

        Raises:
            MemoryShort: it did not in time.
        """
        until_s = time.monotonic() + _MEMORY_WAIT_S
        with self._changed:
            while True:
                try:
                    with self._budget.admission() as left_nbytes:
                        return take(left_nbytes)
                except MemoryShort:
                    if self._is_stopping or is_over() or time.monotonic() >= until_s:
                        raise
                self._changed.wait(_MEMORY_POLL_S)

    def _update(self, change: Callable[[SnapshotTable], SnapshotTable]) -> None:
        with self._changed:
            self._table = change(self._table)
            self._release_unused()

    def _release_unused(self, retaken: SnapshotId | None = None) -> None:
        """Release the memory and the indexes that the table no longer names. Under the lock.

        Of a snapshot that is retaken, nothing that was made of its first copy is kept.
        """
        table = self._table
        used = {shard.buffer for shard in table.shards.values()} | table.free.keys()
        for number in self._arenas.keys() - used:
            self._arenas.pop(number).close()
        for key in [key for key in self._shards if key not in table.shards]:
            del self._shards[key]
        for key in [key for key in self._awaited if key[0] < table.committed]:
            del self._awaited[key]
        self._on_retained({snapshot for snapshot, _ in table.shards} - {retaken})

    def _dropped(self, mapped: Sequence[int]) -> tuple[int, ...]:
        return tuple(number for number in mapped if number not in self._arenas)

    def _arena_of_buffer(self, number: int, capacity: int) -> Arena:
        if number not in self._arenas:
            self._arenas[number] = self._budget.create(capacity)
        return self._arenas[number]

    def _shard(self, snapshot: SnapshotId, rank: int) -> _SealedShard:
        shard = self._shards.get((snapshot, rank))
        if shard is None:
            raise SnapshotUnavailable(
                f"rank {rank}'s part of step {snapshot.step} (generation {snapshot.generation}) "
                f"is not held here"
            )
        return shard

    def _arena(self, snapshot: SnapshotId, rank: int) -> Arena:
        self._shard(snapshot, rank)
        return self._arenas[self._table.shards[snapshot, rank].buffer]

    def _read_index(self, snapshot: SnapshotId, rank: int) -> Mapping[str, tuple[Entry, ...]]:
        """Return a shard's entries by key, read from its buffer the first time. Under the lock."""
        shard = self._shard(snapshot, rank)
        if shard.index is None:
            encoded = self._arena(snapshot, rank).range(shard.index_offset, shard.index_nbytes)
            known, entries = self._read.get(rank, (None, {}))
            decoded = read_index(encoded.view, rank, known)
            if known is None or decoded.index.entries is not known.index.entries:
                entries = decoded.index.by_key
            boxes = replace(decoded, index=replace(decoded.index, documents={}))
            self._read[rank] = boxes, entries
            shard.index, shard.entries = decoded.index, entries
        return shard.entries
