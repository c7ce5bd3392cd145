"""Decides which snapshots a node keeps in memory, and into which buffer the next one goes.

Pure. A shard is one rank's part of one snapshot, kept in one buffer. Rules:
- A rank may begin a snapshot only in the current generation, and only if its last one in this
  generation is committed or was never sealed: two buffers alternate, and one of them always holds a
  committed snapshot.
- A commit frees everything older. Opening a generation forgets shards that were left unsealed.
- A commit grants a free buffer to each rank that has sealed the snapshot, for its next shard: the
  rank may write there without asking, and seals that buffer. It gives the grant up if it begins a
  shard instead, and opening a generation ends all grants.
- A fenced generation seals nothing more: its collectives may be aborted, and leave garbage.
- A pinned snapshot (being stored) stays until it is unpinned, though newer ones are committed;
  meanwhile a third buffer is used.
- A shard of a lost node may be adopted, to be rebuilt here; it is no part of what this node itself
  has sealed. While it is written it stays in its buffer whatever else is freed.

Every function that returns a changed table checks the invariants (`check_table`, `check_change`)
and raises `SnapshotInvariantViolated` instead of returning a table that breaks one:
- A buffer belongs to one shard, or is free.
- A granted buffer is free, and granted to one rank: until that seals or begins a shard, or the
  generation ends.
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

    `free` are buffers without a shard, by number, with their sizes in bytes; `granted` are those of
    them that ranks may write their next shards into, by rank; `pinned` counts pins. Nothing is
    begun or sealed in generations up to `fenced`.
    """

    generation: int = 0
    fenced: int = 0
    committed: SnapshotId = _NOTHING
    shards: Mapping[tuple[SnapshotId, int], ShardBuffer] = field(default_factory=dict)
    free: Mapping[int, int] = field(default_factory=dict)
    granted: Mapping[int, int] = field(default_factory=dict)
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
    return _checked(table, _retain_only(table, kept, generation=generation, granted={}))


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
    discard_uncommitted: bool = False,
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a rank a buffer for a snapshot.

    Args:
        table: what is held.
        snapshot: what is to be taken.
        rank: whose part.
        nbytes: size of the part.
        available_nbytes: memory that the node can still give.
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
    kept = _without_grant(table, rank)
    if given_up:
        left = {key: held for key, held in table.shards.items() if key not in given_up}
        kept = _retain_only(kept, left)
    after, held = _assign_buffer(kept, (snapshot, rank), nbytes, available_nbytes, adopted=False)
    return _checked(table, after, discarded=uncommitted, beginning=rank), held


def has_buffer(table: SnapshotTable, rank: int, nbytes: int) -> bool:
    """Whether a rank's shard is given a free buffer, so that no memory is needed for it."""
    return bool(_fitting(table.free, _without_grant(table, rank).granted, nbytes))


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


def seal(
    table: SnapshotTable, snapshot: SnapshotId, rank: int, *, granted: int | None = None
) -> SnapshotTable:
    """Mark a shard complete.

    Args:
        table: what is held.
        snapshot: what the shard is a part of.
        rank: whose part.
        granted: the granted buffer that it was written into; None if it was begun.

    Raises:
        SnapshotUnavailable: the generation is over, or the shard was neither begun nor written into
            a buffer that is granted to the rank.
    """
    _check_not_fenced(table, snapshot, rank)
    held = table.shards.get((snapshot, rank))
    is_begun = held is not None and not held.sealed and granted is None
    is_granted = held is None and granted is not None and table.granted.get(rank) == granted
    if snapshot.generation != table.generation or not (is_begun or is_granted):
        raise SnapshotUnavailable(
            f"rank {rank} may not seal step {snapshot.step} of generation {snapshot.generation}: "
            f"it was not begun, or generation {table.generation} has replaced its own"
        )
    after = table
    if granted is not None:
        free = {b: c for b, c in table.free.items() if b != granted}
        held = ShardBuffer(granted, table.free[granted])
        shards = {**table.shards, (snapshot, rank): held}
        after = replace(_without_grant(table, rank), free=free, shards=shards)
    return _checked(table, _sealed(after, (snapshot, rank)))


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

    Ranks that have taken it are granted buffers for their next shards, if there are free ones.

    One of an older generation is what this one resumes from. Whatever older generations have sealed
    after it is freed too: nobody resumes from that any more.
    """
    if snapshot < table.committed or snapshot.generation >= table.generation:
        after = _without_older(table, snapshot)
        return _checked(table, _with_grants(after, snapshot, _last_buffers(table, snapshot)))
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


def _last_buffers(table: SnapshotTable, snapshot: SnapshotId) -> dict[int, int]:
    """Return the buffers of ranks' shards of the generation that are older than a snapshot."""
    return {
        rank: held.buffer
        for (of, rank), held in table.shards.items()
        if of.generation == table.generation and of < snapshot and not held.adopted
    }


def _with_grants(
    table: SnapshotTable, snapshot: SnapshotId, last: Mapping[int, int]
) -> SnapshotTable:
    """Grant a buffer to each rank whose newest shard in the generation is of this snapshot.

    A rank is granted its `last` buffer, which it has mapped, if that is free.
    """
    if snapshot.generation != table.generation:
        return table
    granted = dict(table.granted)
    going_on = {rank for of, rank in table.shards if of > snapshot} | table.granted.keys()
    committed = {
        rank: held.capacity
        for (of, rank), held in table.shards.items()
        if of == snapshot and held.sealed and not held.adopted and rank not in going_on
    }
    free = table.free.keys() - granted.values()
    granted.update({rank: last[rank] for rank in committed if last.get(rank) in free})
    for rank in sorted(committed.keys() - granted.keys()):
        # The rank's next shard is as large as its last one, nearly always.
        if fitting := _fitting(table.free, granted, committed[rank]):
            granted[rank] = min(fitting)[1]
    return replace(table, granted=granted)


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
        SnapshotInvariantViolated: a buffer has two owners, or a rank two uncommitted snapshots, or
            a granted buffer is not free.
    """
    buffers = [held.buffer for held in table.shards.values()] + list(table.free)
    if len(set(buffers)) != len(buffers) or any(b >= table.next_buffer for b in buffers):
        raise SnapshotInvariantViolated(
            "a buffer belongs to one shard, or is free",
            f"buffers {sorted(buffers)}, the next is {table.next_buffer}",
        )
    granted = list(table.granted.values())
    if len(set(granted)) != len(granted) or not table.free.keys() >= set(granted):
        raise SnapshotInvariantViolated(
            "a granted buffer is free, and granted to one rank",
            f"{dict(table.granted)} are granted by rank, and {sorted(table.free)} are free",
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
    before: SnapshotTable,
    after: SnapshotTable,
    discarded: Collection[ShardKey] = (),
    beginning: int | None = None,
) -> None:
    """Check that a change keeps what has to be kept.

    Args:
        before: the table as it was.
        after: the table as it would be.
        discarded: shards that are forgotten on purpose.
        beginning: the rank that begins a shard, and gives up what it was granted.

    Raises:
        SnapshotInvariantViolated: a sealed shard, or one that is being rebuilt, would be lost or
            moved, a granted buffer would be taken away, or a count would sink.
    """
    if (after.generation, after.committed) != (
        max(before.generation, after.generation),
        max(before.committed, after.committed),
    ):
        raise SnapshotInvariantViolated(
            "a table's generation and committed snapshot never go back",
            f"{before.generation}, {before.committed} become {after.generation}, {after.committed}",
        )
    for rank, buffer in before.granted.items() if before.generation == after.generation else ():
        if after.granted.get(rank) == buffer or rank == beginning:
            continue
        if (rank, buffer) not in {(key[1], held.buffer) for key, held in after.shards.items()}:
            raise SnapshotInvariantViolated(
                "a granted buffer stays its rank's until that seals or begins a shard",
                f"buffer {buffer} was granted to rank {rank}, and {dict(after.granted)} are now",
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
    before: SnapshotTable,
    after: SnapshotTable,
    discarded: Collection[ShardKey] = (),
    beginning: int | None = None,
) -> SnapshotTable:
    check_table(after)
    check_change(before, after, discarded, beginning)
    return after


def _sealed(table: SnapshotTable, key: ShardKey) -> SnapshotTable:
    held = replace(table.shards[key], sealed=True)
    return replace(table, shards={**table.shards, key: held})


def _without_surplus(table: SnapshotTable) -> SnapshotTable:
    """Keep two buffers for each rank.

    What was needed beside a pinned snapshot, or to adopt shards, goes back to the system.
    """
    ranks = {rank for _, rank in table.shards}
    if not ranks:
        return table
    surplus = len(table.free) + len(table.shards) - 2 * len(ranks)
    if surplus <= 0:
        return table
    granted = set(table.granted.values())
    largest_first = sorted(table.free.items(), key=lambda item: (item[0] in granted, -item[1]))
    surplus = min(surplus, len(table.free) - len(granted))
    return replace(table, free=dict(largest_first[surplus:]))


def _assign_buffer(
    table: SnapshotTable,
    key: tuple[SnapshotId, int],
    nbytes: int,
    available_nbytes: int,
    *,
    adopted: bool,
) -> tuple[SnapshotTable, ShardBuffer]:
    """Give a shard a free buffer, or a new one."""
    after, held = _choose_buffer(table, key, nbytes, available_nbytes, adopted=adopted)
    if held.capacity < nbytes:
        raise SnapshotInvariantViolated(
            "a buffer is as large as the shard that it is given for",
            f"buffer {held.buffer} has {held.capacity} of {nbytes} bytes",
        )
    return after, held


def _choose_buffer(
    table: SnapshotTable, key: ShardKey, nbytes: int, available_nbytes: int, *, adopted: bool
) -> tuple[SnapshotTable, ShardBuffer]:
    fitting = _fitting(table.free, table.granted, nbytes)
    if fitting:
        capacity, buffer = min(fitting)
        free = {b: c for b, c in table.free.items() if b != buffer}
        held = ShardBuffer(buffer, capacity, adopted=adopted)
        return replace(table, free=free, shards={**table.shards, key: held}), held
    # Buffers that have become too small for this job are of no use to it.
    granted = set(table.granted.values())
    free = {b: c for b, c in table.free.items() if c >= nbytes or b in granted}
    if nbytes + _MEMORY_RESERVE_NBYTES > available_nbytes:
        raise MemoryShort(
            f"a snapshot of rank {key[1]} needs {nbytes / 2**20:.0f} MiB and the node has "
            f"{available_nbytes / 2**20:.0f} MiB left; use snapshot_every=... less often, fewer "
            "workers or more memory"
        )
    held = ShardBuffer(table.next_buffer, nbytes, adopted=adopted)
    shards = {**table.shards, key: held}
    return replace(table, free=free, shards=shards, next_buffer=table.next_buffer + 1), held


def _fitting(
    free: Mapping[int, int], granted: Mapping[int, int], nbytes: int
) -> list[tuple[int, int]]:
    """Return the capacities and numbers of the free buffers that are given to a shard."""
    return [
        (capacity, buffer)
        for buffer, capacity in free.items()
        if nbytes <= capacity <= 2 * nbytes + _MAX_UNUSED_NBYTES
        if buffer not in granted.values()
    ]


def _without_grant(table: SnapshotTable, rank: int) -> SnapshotTable:
    if rank not in table.granted:
        return table
    return replace(table, granted={r: b for r, b in table.granted.items() if r != rank})


def _retain_only(
    table: SnapshotTable, kept: Mapping[tuple[SnapshotId, int], ShardBuffer], **changes: Any
) -> SnapshotTable:
    """Free the shards that are not kept, and change other fields."""
    freed = {held.buffer: held.capacity for key, held in table.shards.items() if key not in kept}
    return replace(table, shards=dict(kept), free={**table.free, **freed}, **changes)
