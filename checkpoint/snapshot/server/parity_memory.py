"""Holds this node's parity of snapshots and the tables of shards, and gives other nodes stripes.

A node that keeps parity of another one also keeps the table of where that node's shards
begin, with their checksums: so what is rebuilt from the parity is known to be right.

Invariant: the parity of a snapshot is visible to others only once all of it is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from keepstep.checkpoint.errors import MemoryShort, SnapshotUnavailable
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup, ShardTable, table_nbytes
from keepstep.checkpoint.snapshot.memory.messages import ReadStripe
from keepstep.checkpoint.snapshot.server.blocks import SnapshotIncomplete, stripes_of
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.transport import FileRange

# So a parity buffer outlives small growth of the shards' indexes.
_GRANULARITY_NBYTES = 64 * 2**10
_MEMORY_RESERVE_NBYTES = 64 * 2**20

_ANSWER_TIMEOUT_S = 10.0


@dataclass(slots=True)
class SnapshotParity:
    """This node's parity of one snapshot.

    Args:
        group: the group that it protects.
        blocks: a buffer and its filled length in bytes for every stripe.
        tables: the tables of the nodes that it protects, by position.
    """

    group: ErasureGroup
    blocks: dict[int, tuple[Arena, int]] = field(default_factory=dict)
    tables: dict[int, ShardTable] = field(default_factory=dict)


class ParityMemory:
    """The parity that a node keeps. Thread-safe; `close` frees everything.

    Args:
        memory: holds the node's own shards.
        budget: the node's memory.
    """

    def __init__(self, memory: SnapshotMemory, budget: MemoryBudget) -> None:
        self._memory = memory
        self._budget = budget
        self._changed = threading.Condition()
        self._group = ErasureGroup(generation=0, addresses=("",), position=0, parity=0)
        self._own_tables: dict[SnapshotId, ShardTable] = {}
        self._parity: dict[SnapshotId, SnapshotParity] = {}
        self._protected: set[SnapshotId] = set()
        self._free: list[Arena] = []
        # The last generation in which the ranks here seal nothing more, and what they have sealed.
        self._ended: tuple[int, frozenset[SnapshotId]] = (0, frozenset())
        self._is_stopping = False

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        with self._changed:
            used = [
                arena for parity in self._parity.values() for arena, _ in parity.blocks.values()
            ]
            return sum(arena.nbytes for arena in (*used, *self._free))

    @property
    def group(self) -> ErasureGroup:
        """The group of the current generation."""
        return self._group

    def open_generation(self, group: ErasureGroup) -> None:
        """Protect snapshots by another generation's group from now on."""
        with self._changed:
            self._group = group
            self._changed.notify_all()

    def end_generation(self, sealed: Collection[SnapshotId]) -> None:
        """Let no other node wait for what this node's ranks have not sealed in the generation.

        Args:
            sealed: what all of them have; the tables of some may be computed yet.
        """
        with self._changed:
            self._ended = self._group.generation, frozenset(sealed)
            self._changed.notify_all()

    def is_protected(self, snapshot: SnapshotId) -> bool:
        """Whether this node's parity of a snapshot is complete."""
        with self._changed:
            return snapshot in self._protected

    def mark_unprotected(self, snapshot: SnapshotId) -> None:
        """Do not count on a snapshot's parity any more, for a block of it is damaged."""
        with self._changed:
            self._protected.discard(snapshot)

    def own_table(self, snapshot: SnapshotId) -> ShardTable | None:
        """Return the table of this node's own bytes; None if it is not known, or given up."""
        with self._changed:
            return self._own_tables.get(snapshot)

    def set_own_table(self, snapshot: SnapshotId, table: ShardTable) -> None:
        """Give other nodes this node's own bytes from now on, for its ranks have sealed them."""
        with self._changed:
            self._own_tables[snapshot] = table
            self._changed.notify_all()

    def take_buffer(self, nbytes: int) -> Arena:
        """Return a free buffer that is large enough, or a new one.

        Raises:
            MemoryShort: the node has too little memory.
        """
        with self._changed:
            fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
            if fitting:
                arena = min(fitting, key=lambda arena: arena.nbytes)
                self._free.remove(arena)
                return arena
        capacity = round_up(max(nbytes, 1), _GRANULARITY_NBYTES)
        with self._budget.admission() as left_nbytes:
            if capacity + _MEMORY_RESERVE_NBYTES > left_nbytes():
                # Without what is left: this is tried again and again, and logged once.
                raise MemoryShort(
                    f"parity needs {capacity / 2**20:.0f} MiB, which the node does not have left; "
                    "use larger groups (--group-size) or less parity (--parity), and see whether "
                    "another job's state is kept here (keepstep snapshot server in ps)"
                )
            return self._budget.create(capacity)

    def publish(self, snapshot: SnapshotId, parity: SnapshotParity) -> bool:
        """Count a snapshot as protected here; False if its generation is over, or it is given up.

        Its buffers belong to this from then on, if it returns True.
        """
        with self._changed:
            is_given_up = parity.group.parity > 0 and snapshot not in self._own_tables
            if self._is_stopping or self._group != parity.group or is_given_up:
                return False
            self._parity[snapshot] = parity
            self._protected.add(snapshot)
            return True

    def release(self, parity: SnapshotParity) -> None:
        """Take back the buffers of parity that is not published."""
        with self._changed:
            self._free += [arena for arena, _ in parity.blocks.values()]

    def retain_only(self, snapshots: Collection[SnapshotId]) -> bool:
        """Forget other snapshots than these; whether one of them was not protected yet."""
        with self._changed:
            for snapshot in [s for s in self._parity if s not in snapshots]:
                self.release(self._parity.pop(snapshot))
            # Of each row one buffer is in use and one may be free; others are too small or surplus.
            largest_first = sorted(self._free, key=lambda arena: -arena.nbytes)
            self._free = largest_first[: self._group.parity]
            for arena in largest_first[self._group.parity :]:
                arena.close()
            given_up = self._own_tables.keys() - set(snapshots) - self._protected
            self._own_tables = {s: table for s, table in self._own_tables.items() if s in snapshots}
            self._protected &= set(snapshots)
        return bool(given_up)

    @contextmanager
    def stripe(self, request: ReadStripe) -> Iterator[tuple[ShardTable | None, list[FileRange]]]:
        """Return the bytes that a request wants of what this node holds of a stripe.

        With them comes the table of this node's own bytes, if these are what is wanted. They are
        kept while the context lasts.

        Raises:
            SnapshotUnavailable: the snapshot is not complete here in time.
            SnapshotIncomplete: it never will be.
            ValueError: there is no such stripe.
        """
        snapshot = request.snapshot
        group = self._group_of(snapshot)
        stripes = stripes_of(group)
        if request.stripe >= stripes.size:
            raise ValueError(f"a group of {stripes.size} nodes has no stripe {request.stripe}")
        block = stripes.number(request.stripe, group.position)
        if block < stripes.data:
            table = self._wait_for_own_table(snapshot)
            first, last = stripes.block_range(table_nbytes(table), block)
            start, stop = _clip(request, first, last)
            with self._memory.pinned(snapshot):
                yield table, self._own_ranges(snapshot, start, stop)
        else:
            with self._memory.pinned(snapshot):
                arena, nbytes = self._parity_block(snapshot, request.stripe)
                start, stop = _clip(request, 0, nbytes)
                yield None, [arena.range(start, stop - start)]

    def table(self, snapshot: SnapshotId, position: int) -> ShardTable:
        """Return where a node of the group has its shards.

        Raises:
            SnapshotUnavailable: this node does not keep parity of that one.
        """
        with self._changed:
            parity = self._parity.get(snapshot)
            if parity is None or position not in parity.tables:
                raise SnapshotUnavailable(
                    f"nothing is known here about another node's part of step {snapshot.step}"
                )
            return parity.tables[position]

    def stop(self) -> None:
        """End all waits, and publish nothing more."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Free everything. No thread may be using it."""
        self.retain_only(())
        with self._changed:
            for arena in self._free:
                arena.close()
            self._free.clear()

    def _parity_block(self, snapshot: SnapshotId, stripe: int) -> tuple[Arena, int]:
        with self._changed:
            parity = self._parity.get(snapshot)
            if snapshot not in self._protected or parity is None or stripe not in parity.blocks:
                raise SnapshotUnavailable(
                    f"the parity of step {snapshot.step} is not complete here"
                )
            return parity.blocks[stripe]

    def _group_of(self, snapshot: SnapshotId) -> ErasureGroup:
        """Return the group that protects a snapshot, once this node has entered its generation."""

        def has_entered() -> bool:
            return self._is_stopping or self._group.generation >= snapshot.generation

        with self._changed:
            parity = self._parity.get(snapshot)
            if parity is not None:
                return parity.group
            self._changed.wait_for(has_entered, _ANSWER_TIMEOUT_S)
            if self._group.generation != snapshot.generation:
                raise SnapshotUnavailable(
                    f"step {snapshot.step} of generation {snapshot.generation} is not protected "
                    f"here"
                )
            return self._group

    def _wait_for_own_table(self, snapshot: SnapshotId) -> ShardTable:
        """Return the table of this node's own bytes, once its ranks have sealed them."""

        def is_incomplete() -> bool:
            generation, sealed = self._ended
            return generation >= snapshot.generation and snapshot not in sealed

        def is_settled() -> bool:
            is_over = self._is_stopping or self._group.generation > snapshot.generation
            return is_over or is_incomplete() or snapshot in self._own_tables

        with self._changed:
            self._changed.wait_for(is_settled, _ANSWER_TIMEOUT_S)
            if snapshot in self._own_tables:
                return self._own_tables[snapshot]
            if is_incomplete():
                raise SnapshotIncomplete(
                    f"step {snapshot.step} was not sealed here before its generation ended"
                )
            raise SnapshotUnavailable(f"step {snapshot.step} is not sealed here")

    def _own_ranges(self, snapshot: SnapshotId, start: int, stop: int) -> list[FileRange]:
        """Return the memory of a range of this node's own bytes, shard by shard."""
        ranges = []
        begin = 0
        for shard in self._memory.own_shards(snapshot):
            end = begin + shard.nbytes
            first, last = max(start, begin), min(stop, end)
            if last > first:
                ranges.append(shard.arena.range(first - begin, last - first))
            begin = end
        return ranges


def _clip(request: ReadStripe, first: int, last: int) -> tuple[int, int]:
    """Return where the bytes wanted of a block, which is from `first` to `last`, begin and end."""
    start = min(first + request.offset, last)
    return start, last if request.count is None else min(start + request.count, last)
