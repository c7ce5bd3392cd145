"""Decides which snapshots a node keeps in memory, and into which buffer the next one goes.

Pure. A shard is one rank's part of one snapshot, kept in one buffer. Rules:
- A rank may begin a snapshot only in the current generation, and only if its last one in this
  generation is committed or was never sealed: two buffers alternate, and one of them always holds a
  committed snapshot.
- A commit frees everything older. Opening a generation forgets shards that were left unsealed.
- A rank is given a free buffer that it has mapped, if one is large enough: its own older one.
- A fenced generation seals nothing more: its collectives may be aborted, and leave garbage.
- A pinned snapshot (being stored) stays until it is unpinned, though newer ones are committed;
  meanwhile a third buffer is used.
- A shard of a lost node may be adopted, to be rebuilt here; it is no part of what this node itself
  has sealed. While it is written it stays in its buffer whatever else is freed.

Every function that returns a changed table checks the invariants (`check_table`, `check_change`)
and raises `SnapshotInvariantViolated` instead of returning a table that breaks one:
- A buffer belongs to one shard, or is free.
- A rank has one sealed snapshot of the current generation that is not committed, at most.
- A sealed shard that is pinned, or not older than the committed snapshot, stays in its buffer
  unless it is discarded by name; so does a shard that is being rebuilt.
- The generation and the committed snapshot never go back.
- A buffer is as large as the shard that it is given for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.checkpoint.errors import (
    MemoryShort,
    SnapshotInvariantViolated,
    SnapshotUnavailable,
)
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId

_MEMORY_RESERVE_NBYTES = 64 * 2**20

# A buffer larger than twice its shard, and this, was another rank's and is not kept.
_MAX_UNUSED_NBYTES = 2**20

_NOTHING = SnapshotId(0, -1)


@dataclass(frozen=True, slots=True)
class ShardBuffer:
    """A shard's buffer and its size in bytes.

    `sealed`: the shard is complete. `adopted`: it was a lost node's, and is rebuilt here.
    """

    buffer: int
    capacity: int
    sealed: bool = False
    adopted: bool = False

    @property
    def is_being_rebuilt(self) -> bool:
        """Whether the rebuilder writes the buffer."""
        return self.adopted and not self.sealed


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """All that a node holds.

    `free` are buffers without a shard, by number, with their sizes in bytes; `pinned` counts pins.
    Nothing is begun or sealed in generations up to `fenced`.
    """

    generation: int = 0
    fenced: int = 0
    committed: SnapshotId = _NOTHING
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
        ranks: dict[SnapshotId, set[int]] = {}
        for (snapshot, rank), held in self.shards.items():
            if held.sealed and not held.adopted:
                ranks.setdefault(snapshot, set()).add(rank)
        return ranks

    def sealed_ranks(self, snapshot: SnapshotId) -> frozenset[int]:
        """Return this node's ranks whose shards of one snapshot are complete."""
        return frozenset(
            rank
            for (held_snapshot, rank), held in self.shards.items()
            if held.sealed and not held.adopted and held_snapshot == snapshot
        )


ShardKey = tuple[SnapshotId, int]
"""A shard's snapshot and rank."""


def open_generation(table: SnapshotTable, generation: int) -> SnapshotTable:
    """Accept shards of this generation only, from now on. Older numbers change nothing."""
    if generation <= table.generation:
        return table
    kept = {key: held for key, held in table.shards.items() if held.sealed or held.is_being_rebuilt}
    return _checked(table, _retain_only(table, kept, generation=generation))


def fence(table: SnapshotTable, generation: int) -> SnapshotTable:
    """Refuse to begin or seal anything in a generation, from now on."""
    return _checked(table, replace(table, fenced=max(table.fenced, generation)))


def begin(
    table: SnapshotTable,
    snapshot: SnapshotId,
    rank: int,
    nbytes: int,
    available_nbytes: int,
    *,
    mapped: Collection[int] = (),
    discard_uncommitted: bool = False,
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a rank a buffer for a snapshot.

    Args:
        table: what is held.
        snapshot: what is to be taken.
        rank: whose part.
        nbytes: size of the part.
        available_nbytes: memory that the node can still give.
        mapped: the buffers that the rank has mapped, and page-locked for a GPU.
        discard_uncommitted: forget the rank's last snapshot, which can never be committed because
            another rank did not seal it.

    Raises:
        SnapshotUnavailable: the generation is over, or the rank's last snapshot is not committed
            yet.
        MemoryShort: the node has not enough memory.
    """
    _check_not_fenced(table, snapshot, rank)
    if snapshot.generation != table.generation:
        raise SnapshotUnavailable(
            f"rank {rank} may not write in generation {snapshot.generation}: it is over, "
            f"the current one is {table.generation}"
        )
    own_shards = {
        key: held
        for key, held in table.shards.items()
        if key[1] == rank and key[0].generation == snapshot.generation
    }
    uncommitted = {
        key for key, held in own_shards.items() if held.sealed and key[0] > table.committed
    }
    is_sealed = (snapshot, rank) in own_shards and own_shards[snapshot, rank].sealed
    if (uncommitted or is_sealed) and not discard_uncommitted:
        waiting_for = min(uncommitted)[0].step if uncommitted else snapshot.step
        raise SnapshotUnavailable(
            f"rank {rank} may not begin a snapshot of step {snapshot.step}: that of step "
            f"{waiting_for} is sealed and not committed yet; wait for the commit"
        )
    given_up = uncommitted | {key for key, held in own_shards.items() if not held.sealed}
    kept = table
    if given_up:
        left = {key: held for key, held in table.shards.items() if key not in given_up}
        kept = _retain_only(table, left)
    after, held = _assign_buffer(
        kept, (snapshot, rank), nbytes, available_nbytes, mapped=mapped, adopted=False
    )
    return _checked(table, after, discarded=uncommitted), held


def has_buffer(table: SnapshotTable, nbytes: int) -> bool:
    """Whether a shard of this size is given a free buffer, so that no memory is needed for it."""
    return bool(_fitting(table.free, nbytes))


def adopt(
    table: SnapshotTable, snapshot: SnapshotId, rank: int, nbytes: int, available_nbytes: int
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a lost node's shard a buffer to be rebuilt in; arguments as for `begin`.

    Call `complete_adoption` when it is rebuilt.

    Raises:
        SnapshotUnavailable: the shard is here already.
        MemoryShort: the node has not enough memory.
    """
    if (snapshot, rank) in table.shards:
        raise SnapshotUnavailable(f"rank {rank}'s part of step {snapshot.step} is here already")
    after, held = _assign_buffer(table, (snapshot, rank), nbytes, available_nbytes, adopted=True)
    return _checked(table, after), held


def complete_adoption(table: SnapshotTable, snapshot: SnapshotId, rank: int) -> SnapshotTable:
    """Mark an adopted shard complete, in whatever generation; free it if it is too old by now."""
    complete = _checked(table, _sealed(table, (snapshot, rank)))
    return _checked(complete, _without_older(complete, table.committed))


def seal(table: SnapshotTable, snapshot: SnapshotId, rank: int) -> SnapshotTable:
    """Mark a shard complete.

    Raises:
        SnapshotUnavailable: the generation is over, or the shard was not begun.
    """
    _check_not_fenced(table, snapshot, rank)
    held = table.shards.get((snapshot, rank))
    if snapshot.generation != table.generation or held is None or held.sealed:
        raise SnapshotUnavailable(
            f"rank {rank} may not seal step {snapshot.step} of generation {snapshot.generation}: "
            f"it was not begun, or generation {table.generation} has replaced its own"
        )
    return _checked(table, _sealed(table, (snapshot, rank)))


def abandon(table: SnapshotTable, snapshot: SnapshotId, rank: int) -> SnapshotTable:
    """Forget a shard that was begun and will not be sealed, for its writer is gone."""
    held = table.shards.get((snapshot, rank))
    if held is None or held.sealed:
        return table
    kept = {key: held for key, held in table.shards.items() if key != (snapshot, rank)}
    return _checked(table, _retain_only(table, kept), discarded={(snapshot, rank)})


def discard(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Forget what is sealed of a snapshot here, for it is damaged."""
    kept = {
        key: held
        for key, held in table.shards.items()
        if key[0] != snapshot or held.is_being_rebuilt
    }
    return _checked(table, _retain_only(table, kept), discarded=table.shards.keys() - kept.keys())


def commit(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Take a snapshot as the one to resume from: everything older is freed, unless pinned.

    One of an older generation is what this one resumes from. Whatever older generations have sealed
    after it is freed too: nobody resumes from that any more.
    """
    if snapshot < table.committed or snapshot.generation >= table.generation:
        return _checked(table, _without_older(table, snapshot))
    left_behind = {
        key
        for key, held in table.shards.items()
        if snapshot < key[0] and key[0].generation < table.generation
        if held.sealed and not held.is_being_rebuilt and key[0] not in table.pinned
    }
    kept = {key: held for key, held in table.shards.items() if key not in left_behind}
    after = _without_older(_retain_only(table, kept), snapshot)
    return _checked(table, after, discarded=left_behind)


def _without_older(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    committed = max(snapshot, table.committed)
    kept = {
        key: held
        for key, held in table.shards.items()
        if key[0] >= committed or key[0] in table.pinned or held.is_being_rebuilt
    }
    after = _retain_only(table, kept, committed=committed)
    return after if after.pinned else _without_surplus(after)


def pin(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Keep a snapshot until it is unpinned as often as it was pinned.

    Raises:
        SnapshotUnavailable: nothing of it is held.
    """
    if not any(key[0] == snapshot for key in table.shards):
        raise SnapshotUnavailable(
            f"step {snapshot.step} of generation {snapshot.generation} is not held here"
        )
    pinned = {**table.pinned, snapshot: table.pinned.get(snapshot, 0) + 1}
    return _checked(table, replace(table, pinned=pinned))


def unpin(table: SnapshotTable, snapshot: SnapshotId) -> SnapshotTable:
    """Let go of a pinned snapshot."""
    pinned = {
        name: count - (name == snapshot)
        for name, count in table.pinned.items()
        if name != snapshot or count > 1
    }
    return _checked(table, _without_older(replace(table, pinned=pinned), table.committed))


def check_table(table: SnapshotTable) -> None:
    """Check a table by itself.

    Raises:
        SnapshotInvariantViolated: a buffer has two owners, or a rank two uncommitted snapshots.
    """
    buffers = [held.buffer for held in table.shards.values()] + list(table.free)
    if len(set(buffers)) != len(buffers) or any(b >= table.next_buffer for b in buffers):
        raise SnapshotInvariantViolated(
            "a buffer belongs to one shard, or is free",
            f"buffers {sorted(buffers)}, the next is {table.next_buffer}",
        )
    uncommitted: set[int] = set()
    for (snapshot, rank), held in table.shards.items():
        if (
            held.sealed
            and not held.adopted
            and snapshot.generation == table.generation
            and snapshot > table.committed
        ):
            if rank in uncommitted:
                raise SnapshotInvariantViolated(
                    "a rank has one sealed snapshot at most that is not committed",
                    f"rank {rank} has more in generation {table.generation}",
                )
            uncommitted.add(rank)


def check_change(
    before: SnapshotTable, after: SnapshotTable, discarded: Collection[ShardKey] = ()
) -> None:
    """Check that a change keeps what has to be kept.

    Args:
        before: the table as it was.
        after: the table as it would be.
        discarded: shards that are forgotten on purpose.

    Raises:
        SnapshotInvariantViolated: a sealed shard, or one that is being rebuilt, would be lost or
            moved, or a count would sink.
    """
    if (after.generation, after.committed) != (
        max(before.generation, after.generation),
        max(before.committed, after.committed),
    ):
        raise SnapshotInvariantViolated(
            "a table's generation and committed snapshot never go back",
            f"{before.generation}, {before.committed} become {after.generation}, {after.committed}",
        )
    for key, held in before.shards.items():
        found = after.shards.get(key)
        if found is held:
            continue
        is_kept = key[0] >= after.committed or key[0] in after.pinned
        if held.is_being_rebuilt and key not in discarded:
            if found is None or found.buffer != held.buffer:
                raise SnapshotInvariantViolated(
                    "a shard that is being rebuilt stays in its buffer",
                    f"rank {key[1]}'s part of {key[0]} was in buffer {held.buffer}, and is {found}",
                )
        elif held.sealed and is_kept and key not in discarded and found != held:
            raise SnapshotInvariantViolated(
                "a sealed shard that may be needed stays in its buffer",
                f"rank {key[1]}'s part of {key[0]} was in buffer {held.buffer}, and is {found}",
            )


def _check_not_fenced(table: SnapshotTable, snapshot: SnapshotId, rank: int) -> None:
    if snapshot.generation <= table.fenced:
        raise SnapshotUnavailable(
            f"rank {rank} may not write step {snapshot.step} of generation {snapshot.generation}: "
            "the generation ends, and what its collectives still return may be garbage"
        )


def _checked(
    before: SnapshotTable, after: SnapshotTable, discarded: Collection[ShardKey] = ()
) -> SnapshotTable:
    check_table(after)
    check_change(before, after, discarded)
    return after


def _sealed(table: SnapshotTable, key: ShardKey) -> SnapshotTable:
    held = replace(table.shards[key], sealed=True)
    return replace(table, shards={**table.shards, key: held})


def _without_surplus(table: SnapshotTable) -> SnapshotTable:
    """Keep two buffers for each rank.

    Memory that was needed in addition to a pinned snapshot, or to adopt shards, is freed.
    """
    ranks = {rank for _, rank in table.shards}
    if not ranks:
        return table
    surplus = len(table.free) + len(table.shards) - 2 * len(ranks)
    if surplus <= 0:
        return table
    largest_first = sorted(table.free.items(), key=lambda item: -item[1])
    return replace(table, free=dict(largest_first[surplus:]))


def _assign_buffer(
    table: SnapshotTable,
    key: tuple[SnapshotId, int],
    nbytes: int,
    available_nbytes: int,
    *,
    mapped: Collection[int] = (),
    adopted: bool,
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a shard a free buffer, or a new one."""
    after, held = _choose_buffer(
        table, key, nbytes, available_nbytes, mapped=mapped, adopted=adopted
    )
    if held.capacity < nbytes:
        raise SnapshotInvariantViolated(
            "a buffer is as large as the shard that it is given for",
            f"buffer {held.buffer} has {held.capacity} of {nbytes} bytes",
        )
    return after, held


def _choose_buffer(
    table: SnapshotTable,
    key: ShardKey,
    nbytes: int,
    available_nbytes: int,
    *,
    mapped: Collection[int],
    adopted: bool,
) -> tuple[SnapshotTable, ShardBuffer]:
    fitting = _fitting(table.free, nbytes)
    if fitting:
        capacity, buffer = min(fitting, key=lambda found: (found[1] not in mapped, *found))
        free = {b: c for b, c in table.free.items() if b != buffer}
        held = ShardBuffer(buffer, capacity, adopted=adopted)
        return replace(table, free=free, shards={**table.shards, key: held}), held
    # Buffers that have become too small for this job are of no use to it.
    free = {b: c for b, c in table.free.items() if c >= nbytes}
    if nbytes + _MEMORY_RESERVE_NBYTES > available_nbytes:
        raise MemoryShort(
            f"a snapshot of rank {key[1]} needs {nbytes / 2**20:.0f} MiB and the node has "
            f"{available_nbytes / 2**20:.0f} MiB left; use snapshot_every=... less often, fewer "
            "workers or more memory, and see whether another job's state is kept here (keepstep "
            "snapshot server in ps)"
        )
    held = ShardBuffer(table.next_buffer, nbytes, adopted=adopted)
    shards = {**table.shards, key: held}
    return replace(table, free=free, shards=shards, next_buffer=table.next_buffer + 1), held


def _fitting(free: Mapping[int, int], nbytes: int) -> list[tuple[int, int]]:
    """Return the capacities and numbers of the free buffers that are given to a shard."""
    return [
        (capacity, buffer)
        for buffer, capacity in free.items()
        if nbytes <= capacity <= 2 * nbytes + _MAX_UNUSED_NBYTES
    ]


def _retain_only(
    table: SnapshotTable, kept: Mapping[tuple[SnapshotId, int], ShardBuffer], **changes: Any
) -> SnapshotTable:
    """Free the shards that are not kept, and change other fields."""
    freed = {held.buffer: held.capacity for key, held in table.shards.items() if key not in kept}
    return replace(table, shards=dict(kept), free={**table.free, **freed}, **changes)
