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

_SPARE_NBYTES = 64 * 2**20

# A buffer that is larger than twice what it is to hold, and this, was another rank's and is not worth keeping.
_SLACK_NBYTES = 2**20


@dataclass(frozen=True, slots=True, order=True)
class Snapshot:
    """A snapshot's name: generations order first, then steps."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Held:
    """A shard's buffer and its size in bytes, whether the shard is complete, and whether it was another node's."""

    buffer: int
    capacity: int
    sealed: bool = False
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Shelf:
    """All that a node holds. `free` are buffers without a shard, by number, with their sizes in bytes; `pinned` counts the pins."""

    generation: int = 0
    committed: Snapshot = Snapshot(0, -1)
    shards: Mapping[tuple[Snapshot, int], Held] = field(default_factory=dict)
    free: Mapping[int, int] = field(default_factory=dict)
    pinned: Mapping[Snapshot, int] = field(default_factory=dict)
    next_buffer: int = 1

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return sum(held.capacity for held in self.shards.values()) + sum(self.free.values())

    def sealed(self) -> dict[Snapshot, set[int]]:
        """Return this node's ranks whose shards are complete, for every snapshot."""
        found: dict[Snapshot, set[int]] = {}
        for (snapshot, rank), held in self.shards.items():
            if held.sealed and not held.adopted:
                found.setdefault(snapshot, set()).add(rank)
        return found


def open_generation(shelf: Shelf, generation: int) -> Shelf:
    """Accept shards of this generation only, from now on. Older numbers change nothing."""
    if generation <= shelf.generation:
        return shelf
    kept = {k: h for k, h in shelf.shards.items() if h.sealed}
    return _keep(replace(shelf, generation=generation), kept)


def begin(
    shelf: Shelf,
    snapshot: Snapshot,
    rank: int,
    nbytes: int,
    available_nbytes: int,
    *,
    gives_up: bool = False,
) -> tuple[Shelf, Held]:
    """Give a rank a buffer for a snapshot.

    Args:
        shelf: what is held.
        snapshot: what is to be taken.
        rank: whose part.
        nbytes: size of the part.
        available_nbytes: memory that the node can still give.
        gives_up: the rank's last snapshot can never be committed, for another rank did not seal it: it is forgotten.

    Raises:
        SnapshotUnavailable: the generation is over, the rank's last snapshot is not committed yet, or the node has not
            enough memory.
    """
    if snapshot.generation != shelf.generation:
        raise SnapshotUnavailable(
            f"rank {rank} may not write in generation {snapshot.generation}: it is over, "
            f"the current one is {shelf.generation}"
        )
    mine = {
        key: held
        for key, held in shelf.shards.items()
        if key[1] == rank and key[0].generation == snapshot.generation
    }
    uncommitted = [key[0] for key, held in mine.items() if held.sealed and key[0] > shelf.committed]
    if gives_up:
        shelf = _keep(
            shelf,
            {k: h for k, h in shelf.shards.items() if k not in {(s, rank) for s in uncommitted}},
        )
        mine = {key: held for key, held in mine.items() if key[0] not in uncommitted}
    elif uncommitted or ((snapshot, rank) in mine and mine[snapshot, rank].sealed):
        waiting_for = uncommitted[0].step if uncommitted else snapshot.step
        raise SnapshotUnavailable(
            f"rank {rank} may not begin a snapshot of step {snapshot.step}: that of step {waiting_for} is sealed and "
            "not committed yet; wait for the commit"
        )
    abandoned = {key for key, held in mine.items() if not held.sealed}
    shelf = _keep(shelf, {k: h for k, h in shelf.shards.items() if k not in abandoned})
    return _place(shelf, (snapshot, rank), nbytes, available_nbytes, adopted=False)


def adopt(
    shelf: Shelf, snapshot: Snapshot, rank: int, nbytes: int, available_nbytes: int
) -> tuple[Shelf, Held]:
    """Give a lost node's shard a buffer to be rebuilt in; call `complete_adoption` when it is. Arguments as for `begin`.

    Raises:
        SnapshotUnavailable: the shard is here already, or the node has not enough memory.
    """
    if (snapshot, rank) in shelf.shards:
        raise SnapshotUnavailable(f"rank {rank}'s part of step {snapshot.step} is here already")
    return _place(shelf, (snapshot, rank), nbytes, available_nbytes, adopted=True)


def complete_adoption(shelf: Shelf, snapshot: Snapshot, rank: int) -> Shelf:
    """Mark an adopted shard complete, in whatever generation."""
    held = shelf.shards[snapshot, rank]
    return replace(shelf, shards={**shelf.shards, (snapshot, rank): replace(held, sealed=True)})


def seal(shelf: Shelf, snapshot: Snapshot, rank: int) -> Shelf:
    """Mark a shard complete.

    Raises:
        SnapshotUnavailable: the generation is over, or the shard was not begun.
    """
    held = shelf.shards.get((snapshot, rank))
    if snapshot.generation != shelf.generation or held is None or held.sealed:
        raise SnapshotUnavailable(
            f"rank {rank} may not seal step {snapshot.step} of generation {snapshot.generation}: "
            f"it was not begun, or generation {shelf.generation} has replaced its own"
        )
    return replace(shelf, shards={**shelf.shards, (snapshot, rank): replace(held, sealed=True)})


def abandon(shelf: Shelf, snapshot: Snapshot, rank: int) -> Shelf:
    """Forget a shard that was begun and will not be sealed, for its writer is gone."""
    held = shelf.shards.get((snapshot, rank))
    if held is None or held.sealed:
        return shelf
    return _keep(shelf, {k: h for k, h in shelf.shards.items() if k != (snapshot, rank)})


def forget(shelf: Shelf, snapshot: Snapshot) -> Shelf:
    """Forget what is sealed of a snapshot here, for it is damaged."""
    return _keep(shelf, {k: h for k, h in shelf.shards.items() if k[0] != snapshot})


def commit(shelf: Shelf, snapshot: Snapshot) -> Shelf:
    """Take a snapshot as the one to resume from: everything older is freed, unless pinned."""
    committed = max(snapshot, shelf.committed)
    shelf = replace(shelf, committed=committed)
    shelf = _keep(
        shelf, {k: h for k, h in shelf.shards.items() if k[0] >= committed or k[0] in shelf.pinned}
    )
    if shelf.pinned:
        return shelf
    # Two buffers for each rank: what was needed beside a pinned snapshot, or to adopt shards, goes back to the system.
    ranks = {rank for _, rank in shelf.shards}
    surplus = len(shelf.free) + len(shelf.shards) - 2 * len(ranks)
    largest_first = sorted(shelf.free.items(), key=lambda item: -item[1])
    return replace(shelf, free=dict(largest_first[max(0, surplus) :]) if ranks else shelf.free)


def pin(shelf: Shelf, snapshot: Snapshot) -> Shelf:
    """Keep a snapshot until it is unpinned as often as it was pinned.

    Raises:
        SnapshotUnavailable: nothing of it is held.
    """
    if not any(key[0] == snapshot for key in shelf.shards):
        raise SnapshotUnavailable(
            f"step {snapshot.step} of generation {snapshot.generation} is not held here"
        )
    return replace(shelf, pinned={**shelf.pinned, snapshot: shelf.pinned.get(snapshot, 0) + 1})


def unpin(shelf: Shelf, snapshot: Snapshot) -> Shelf:
    """Let go of a pinned snapshot."""
    pinned = {s: count - (s == snapshot) for s, count in shelf.pinned.items()}
    return commit(
        replace(shelf, pinned={s: count for s, count in pinned.items() if count}), shelf.committed
    )


def _place(
    shelf: Shelf, key: tuple[Snapshot, int], nbytes: int, available_nbytes: int, *, adopted: bool
) -> tuple[Shelf, Held]:
    """Give a shard a free buffer, or a new one."""
    fitting = [(c, b) for b, c in shelf.free.items() if nbytes <= c <= 2 * nbytes + _SLACK_NBYTES]
    if fitting:
        capacity, buffer = min(fitting)
        free = {b: c for b, c in shelf.free.items() if b != buffer}
        held = Held(buffer, capacity, adopted=adopted)
        return replace(shelf, free=free, shards={**shelf.shards, key: held}), held
    # Buffers that have become too small for this job are of no use to it.
    free = {b: c for b, c in shelf.free.items() if c >= nbytes}
    if nbytes + _SPARE_NBYTES > available_nbytes:
        raise SnapshotUnavailable(
            f"a snapshot of rank {key[1]} needs {nbytes / 2**20:.0f} MiB and the node has "
            f"{available_nbytes / 2**20:.0f} MiB left; use snapshot_every=... less often, fewer workers or more memory"
        )
    held = Held(shelf.next_buffer, nbytes, adopted=adopted)
    shards = {**shelf.shards, key: held}
    return replace(shelf, free=free, shards=shards, next_buffer=shelf.next_buffer + 1), held


def _keep(shelf: Shelf, kept: Mapping[tuple[Snapshot, int], Held]) -> Shelf:
    freed = {held.buffer: held.capacity for key, held in shelf.shards.items() if key not in kept}
    return replace(shelf, shards=dict(kept), free={**shelf.free, **freed})
