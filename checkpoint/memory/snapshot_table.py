"""Which snapshots a node keeps in memory, and which buffer the next one goes into.

Pure. A shard is one rank's part of one snapshot, kept in one buffer. Rules:
- A rank may begin a snapshot only in the current generation, and only if its last one in this generation is committed or was never
  sealed: two buffers alternate, and one of them always holds a committed snapshot.
- A commit frees everything older. Opening a generation forgets shards that older ones left unsealed.
- A pinned snapshot (being stored) stays until unpinned, though newer ones are committed; meanwhile a third buffer is used.
- A shard of a lost node may be adopted, to be rebuilt here; it is no part of what this node itself has sealed.

Invariants: a sealed shard that is not older than the committed snapshot is never overwritten; a buffer holds at most one shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from keepstep.checkpoint.errors import SnapshotUnavailable

_MEMORY_RESERVE_NBYTES = 64 * 2**20

# A buffer that is larger than twice what it is to hold, and this, was another rank's and is not worth keeping.
_MAX_UNUSED_NBYTES = 2**20


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """A snapshot's name: generations order first, then steps."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class ShardBuffer:
    """A shard's buffer and its size in bytes, whether the shard is complete, and whether it was another node's."""

    buffer: int
    capacity: int
    sealed: bool = False
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """All that a node holds. `free` are buffers without a shard, by number, with their sizes in bytes; `pinned` counts the pins."""

    generation: int = 0
    committed: SnapshotId = SnapshotId(0, -1)
    shards: Mapping[tuple[SnapshotId, int], ShardBuffer] = field(default_factory=dict)
    free: Mapping[int, int] = field(default_factory=dict)
    pinned: Mapping[SnapshotId, int] = field(default_factory=dict)
    next_buffer: int = 1

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return sum(held.capacity for held in self.shards.values()) + sum(self.free.values())

    def sealed(self) -> dict[SnapshotId, set[int]]:
        """Return this node's ranks whose shards are complete, for every snapshot."""
        found: dict[SnapshotId, set[int]] = {}
        for (snapshot, rank), held in self.shards.items():
            if held.sealed and not held.adopted:
                found.setdefault(snapshot, set()).add(rank)
        return found


def open_generation(table: SnapshotTable, generation: int) -> SnapshotTable:
    """Accept shards of this generation only, from now on. Older numbers change nothing."""
    if generation <= table.generation:
        return table
    kept = {k: h for k, h in table.shards.items() if h.sealed}
    return _retain_only(replace(table, generation=generation), kept)


def begin(
    table: SnapshotTable,
    snapshot: SnapshotId,
    rank: int,
    nbytes: int,
    available_nbytes: int,
    *,
    discard_uncommitted: bool = False,
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a rank a buffer for a snapshot.

    Args:
        table: what is held.
        snapshot: what is to be taken.
        rank: whose part.
        nbytes: size of the part.
        available_nbytes: memory that the node can still give.
        discard_uncommitted: the rank's last snapshot can never be committed, for another rank did not seal it: it is forgotten.

    Raises:
        SnapshotUnavailable: the generation is over, the rank's last snapshot is not committed yet, or the node has not
            enough memory.
    """
    if snapshot.generation != table.generation:
        raise SnapshotUnavailable(
            f"rank {rank} may not write in generation {snapshot.generation}: it is over, "
            f"the current one is {table.generation}"
        )
    mine = {
        key: held
        for key, held in table.shards.items()
        if key[1] == rank and key[0].generation == snapshot.generation
    }
    uncommitted = [key[0] for key, held in mine.items() if held.sealed and key[0] > table.committed]
    if discard_uncommitted:
        table = _retain_only(
            table,
            {k: h for k, h in table.shards.items() if k not in {(s, rank) for s in uncommitted}},
        )
        mine = {key: held for key, held in mine.items() if key[0] not in uncommitted}
    elif uncommitted or ((snapshot, rank) in mine and mine[snapshot, rank].sealed):
        waiting_for = uncommitted[0].step if uncommitted else snapshot.step
        raise SnapshotUnavailable(
            f"rank {rank} may not begin a snapshot of step {snapshot.step}: that of step {waiting_for} is sealed and "
            "not committed yet; wait for the commit"
        )
    abandoned = {key for key, held in mine.items() if not held.sealed}
    table = _retain_only(table, {k: h for k, h in table.shards.items() if k not in abandoned})
    return _assign_buffer(table, (snapshot, rank), nbytes, available_nbytes, adopted=False)


def adopt(
    table: SnapshotTable, snapshot: SnapshotId, rank: int, nbytes: int, available_nbytes: int
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a lost node's shard a buffer to be rebuilt in; call `complete_adoption` when it is. Arguments as for `begin`.

    Raises:
        SnapshotUnavailable: the shard is here already, or the node has not enough memory.
    """
    if (snapshot, rank) in table.shards:
        raise SnapshotUnavailable(f"rank {rank}'s part of step {snapshot.step} is here already")
    return _assign_buffer(table, (snapshot, rank), nbytes, available_nbytes, adopted=True)


def complete_adoption(table: SnapshotTable, snapshot: SnapshotId, rank: int) -> SnapshotTable:
    """Mark an adopted shard complete, in whatever generation."""
    held = table.shards[snapshot, rank]
    return replace(table, shards={**table.shards, (snapshot, rank): replace(held, sealed=True)})


def seal(table: SnapshotTable, snapshot: SnapshotId, rank: int) -> SnapshotTable:
    """Mark a shard complete.

    Raises:
        SnapshotUnavailable: the generation is over, or the shard was not begun.
    """
    held = table.shards.get((snapshot, rank))
    if snapshot.generation != table.generation or held is None or held.sealed:
        raise SnapshotUnavailable(
            f"rank {rank} may not seal step {snapshot.step} of generation {snapshot.generation}: "
            f"it was not begun, or generation {table.generation} has replaced its own"
        )
    return replace(table, shards={**table.shards, (snapshot, rank): replace(held, sealed=True)})


def abandon(table: SnapshotTable, snapshot: SnapshotId, rank: int) -> SnapshotTable:
    """Forget a shard that was begun and will not be sealed, for its writer is gone."""
    held = table.shards.get((snapshot, rank))
    if held is None or held.sealed:
        return table
    return _retain_only(table, {k: h for k, h in table.shards.items() if k != (snapshot, rank)})


def discard(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Forget what is sealed of a snapshot here, for it is damaged."""
    return _retain_only(table, {k: h for k, h in table.shards.items() if k[0] != snapshot})


def commit(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Take a snapshot as the one to resume from: everything older is freed, unless pinned."""
    committed = max(snapshot, table.committed)
    table = replace(table, committed=committed)
    table = _retain_only(
        table, {k: h for k, h in table.shards.items() if k[0] >= committed or k[0] in table.pinned}
    )
    if table.pinned:
        return table
    # Two buffers for each rank: what was needed beside a pinned snapshot, or to adopt shards, goes back to the system.
    ranks = {rank for _, rank in table.shards}
    surplus = len(table.free) + len(table.shards) - 2 * len(ranks)
    largest_first = sorted(table.free.items(), key=lambda item: -item[1])
    return replace(table, free=dict(largest_first[max(0, surplus) :]) if ranks else table.free)


def pin(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Keep a snapshot until it is unpinned as often as it was pinned.

    Raises:
        SnapshotUnavailable: nothing of it is held.
    """
    if not any(key[0] == snapshot for key in table.shards):
        raise SnapshotUnavailable(
            f"step {snapshot.step} of generation {snapshot.generation} is not held here"
        )
    return replace(table, pinned={**table.pinned, snapshot: table.pinned.get(snapshot, 0) + 1})


def unpin(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Let go of a pinned snapshot."""
    pinned = {s: count - (s == snapshot) for s, count in table.pinned.items()}
    return commit(
        replace(table, pinned={s: count for s, count in pinned.items() if count}), table.committed
    )


def _assign_buffer(
    table: SnapshotTable,
    key: tuple[SnapshotId, int],
    nbytes: int,
    available_nbytes: int,
    *,
    adopted: bool,
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a shard a free buffer, or a new one."""
    fitting = [
        (c, b) for b, c in table.free.items() if nbytes <= c <= 2 * nbytes + _MAX_UNUSED_NBYTES
    ]
    if fitting:
        capacity, buffer = min(fitting)
        free = {b: c for b, c in table.free.items() if b != buffer}
        held = ShardBuffer(buffer, capacity, adopted=adopted)
        return replace(table, free=free, shards={**table.shards, key: held}), held
    # Buffers that have become too small for this job are of no use to it.
    free = {b: c for b, c in table.free.items() if c >= nbytes}
    if nbytes + _MEMORY_RESERVE_NBYTES > available_nbytes:
        raise SnapshotUnavailable(
            f"a snapshot of rank {key[1]} needs {nbytes / 2**20:.0f} MiB and the node has "
            f"{available_nbytes / 2**20:.0f} MiB left; use snapshot_every=... less often, fewer workers or more memory"
        )
    held = ShardBuffer(table.next_buffer, nbytes, adopted=adopted)
    shards = {**table.shards, key: held}
    return replace(table, free=free, shards=shards, next_buffer=table.next_buffer + 1), held


def _retain_only(
    table: SnapshotTable, kept: Mapping[tuple[SnapshotId, int], ShardBuffer]
) -> SnapshotTable:
    freed = {held.buffer: held.capacity for key, held in table.shards.items() if key not in kept}
    return replace(table, shards=dict(kept), free={**table.free, **freed})
