"""Keeping the parity of other nodes' snapshots.

Runs in the snapshot servers. When all ranks of a node have sealed a snapshot, its server pulls from the other nodes of its erasure group
the blocks whose parity it keeps (`keepstep.checkpoint.parity.stripes` says which), and combines them as they arrive. Whoever is asked for a block answers
once its own ranks have sealed: a slow node delays the snapshot's commit and nothing else. A snapshot is protected here once all this
node's parity of it is complete; when all nodes say so, any loss up to the parity can be made good (`keepstep.checkpoint.server.rebuilding`), and it
is committed.

Whoever keeps parity of a node also keeps the table that says where its shards begin, with their checksums: so what is rebuilt is
known to be right.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import crc32c
import psutil

from keepstep.checkpoint.errors import CheckpointError, SnapshotUnavailable
from keepstep.checkpoint.memory.arena import Arena
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.memory.wire import Connection
from keepstep.checkpoint.parity.erasure import parity_rows
from keepstep.checkpoint.parity.stripes import Stripes
from keepstep.checkpoint.server.blocks import (
    ErasureGroup,
    ServerConnections,
    ShardLocation,
    ShardTable,
    combine,
    receive_head,
    table_nbytes,
)
from keepstep.checkpoint.server.priority import yield_to_training

# A parity buffer outlives small growth of the shards' indexes.
_PARITY_GRANULARITY_NBYTES = 64 * 2**10
_MEMORY_RESERVE_NBYTES = 64 * 2**20

_ANSWER_TIMEOUT_S = 10.0
_RETRY_S = 0.1

# A core reads its share of the memory bus; more than these add nothing.
_CHECKSUM_THREADS = 8


@dataclass(slots=True)
class _SnapshotParity:
    """This node's parity of one snapshot: a buffer and its filled length for every stripe, and the tables of those it protects."""

    stripes: Stripes
    position: int
    blocks: dict[int, tuple[Arena, int]] = field(default_factory=dict)
    tables: dict[int, ShardTable] = field(default_factory=dict)


class ProtectionHost(Protocol):
    """What protection needs of the server it runs in."""

    def own_shards(self, snapshot: SnapshotId) -> Sequence[tuple[int, Arena, int, int]]:
        """Return (rank, memory, offset of the index, bytes in use) of each shard that this node's ranks have sealed."""
        ...

    def pin(self, snapshot: SnapshotId) -> None:
        """Keep a snapshot."""
        ...

    def unpin(self, snapshot: SnapshotId) -> None:
        """Let go of it."""
        ...

    def on_protected(self, snapshot: SnapshotId) -> None:
        """Hear that this node's parity of a snapshot is complete."""
        ...


class Protection:
    """Owns the parity buffers, threads and their connections. `close` ends all of them."""

    def __init__(self, host: ProtectionHost, secret: bytes) -> None:
        self._host = host
        self._group = ErasureGroup(0, ("",), 0, 0)
        self._changed = threading.Condition()
        self._own_tables: dict[SnapshotId, ShardTable] = {}
        self._parity: dict[SnapshotId, _SnapshotParity] = {}
        self._protected: set[SnapshotId] = set()
        self._free: list[Arena] = []
        self._pending: SnapshotId | None = None
        self._closing = False
        self._stop = threading.Event()
        self._connections = ServerConnections(secret)
        self._encoding = ThreadPoolExecutor(
            1, thread_name_prefix="keepstep-parity", initializer=yield_to_training
        )

    @property
    def nbytes(self) -> int:
        """Memory of all parity buffers."""
        with self._changed:
            used = [arena for kept in self._parity.values() for arena, _ in kept.blocks.values()]
            return sum(arena.nbytes for arena in (*used, *self._free))

    @property
    def peers(self) -> int:
        """Number of other nodes in this node's group."""
        return len(self._group.addresses) - 1

    def is_protected(self, snapshot: SnapshotId) -> bool:
        """Whether this node's part in protecting a snapshot is complete."""
        return snapshot in self._protected

    def open_generation(self, group: ErasureGroup) -> None:
        """Protect the snapshots of another generation from now on; what is under way for the last one is given up."""
        self._stop.set()
        self._connections.interrupt()
        with self._changed:
            self._stop = threading.Event()
            self._group, self._pending = group, None
            self._changed.notify_all()

    def protect(self, snapshot: SnapshotId) -> None:
        """Begin to protect a snapshot that all ranks of this node have sealed."""
        with self._changed:
            self._pending = snapshot
            self._encoding.submit(self._protect, self._group, snapshot, self._stop)

    def finish_protection(self, timeout_s: float) -> None:
        """Wait until nothing is under way that can be completed, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending is None, timeout_s)

    def retain_only(self, snapshots: Collection[SnapshotId]) -> None:
        """Forget everything about other snapshots than these."""
        with self._changed:
            for snapshot in [s for s in self._parity if s not in snapshots]:
                self._free += [arena for arena, _ in self._parity.pop(snapshot).blocks.values()]
            # Of each row one buffer is in use and one may be free; more have become too small or too many.
            largest_first = sorted(self._free, key=lambda arena: -arena.nbytes)
            self._free = largest_first[: self._group.parity]
            for arena in largest_first[self._group.parity :]:
                arena.close()
            given_up = self._own_tables.keys() - set(snapshots) - self._protected
            self._own_tables = {s: table for s, table in self._own_tables.items() if s in snapshots}
            self._protected &= set(snapshots)
        if given_up:
            self._connections.interrupt()

    def serve(
        self,
        connection: Connection,
        snapshot: SnapshotId,
        stripe: int,
        offset: int,
        count: int | None,
    ) -> None:
        """Send `count` bytes from an offset on (None: all) of what this node holds of a stripe; what lies beyond its end is not sent.

        The message has the table of this node's own bytes if these are what was sent.

        Raises:
            SnapshotUnavailable: the snapshot is not complete here in time.
        """
        group = self._group_of(snapshot)
        number = group.stripes.number(stripe, group.position)
        if number < group.stripes.data:
            table = self._wait_for_own_table(snapshot)
            first, last = group.stripes.block_range(table_nbytes(table), number)
            start = min(first + offset, last)
            stop = last if count is None else min(start + count, last)
            with self._pinned(snapshot):
                ranges = self._own_ranges(snapshot, start, stop)
                connection.send_files({"table": [part.to_json() for part in table]}, ranges)
            return
        with self._pinned(snapshot):
            with self._changed:
                kept = self._parity.get(snapshot)
                if snapshot not in self._protected or kept is None:
                    raise SnapshotUnavailable(
                        f"the parity of step {snapshot.step} is not complete here"
                    )
                arena, nbytes = kept.blocks[stripe]
            start = min(offset, nbytes)
            stop = nbytes if count is None else min(start + count, nbytes)
            connection.send_files(
                {}, [(arena.descriptor, start, stop - start)] if stop > start else []
            )

    def table(self, snapshot: SnapshotId, position: int) -> ShardTable:
        """Return where a group's other node has its shards, which is known to whoever keeps parity of it.

        Raises:
            SnapshotUnavailable: it is not known here.
        """
        with self._changed:
            kept = self._parity.get(snapshot)
            if kept is None or position not in kept.tables:
                raise SnapshotUnavailable(
                    f"nothing is known here about another node's part of step {snapshot.step}"
                )
            return kept.tables[position]

    def is_intact(self, snapshot: SnapshotId) -> bool:
        """Whether this node's own bytes of a snapshot are what they were when they were sealed, as far as that is known."""
        with self._changed:
            table = self._own_tables.get(snapshot)
        return table is None or self._compute_shard_table(snapshot) == table

    def mark_unprotected(self, snapshot: SnapshotId) -> None:
        """Take a snapshot for unprotected here, for a block of it is damaged."""
        with self._changed:
            self._protected.discard(snapshot)

    def close(self) -> None:
        """Give up what is under way and free everything."""
        self._stop.set()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._connections.interrupt()
        self._encoding.shutdown(wait=True, cancel_futures=True)
        self._connections.retain_only(())
        self.retain_only(())
        for arena in self._free:
            arena.close()
        self._free.clear()

    def _protect(self, group: ErasureGroup, snapshot: SnapshotId, stop: threading.Event) -> None:
        """Make this node's part of a snapshot safe: a table of its own bytes, and parity of the others'."""
        try:
            if group.parity:
                table = self._compute_shard_table(snapshot)
                with self._changed:
                    self._own_tables[snapshot] = table
                    self._changed.notify_all()
            while not stop.is_set() and not self._try_to_encode(group, snapshot, stop):
                if snapshot not in self._own_tables:
                    return
                # Meanwhile the agents find out whether the peer is dead, and if so this generation ends.
                with self._changed:
                    self._pending = None
                    self._changed.notify_all()
                stop.wait(_RETRY_S)
        except (CheckpointError, OSError) as error:
            print(
                f"keepstep snapshot server: step {snapshot.step} is not protected: {error}",
                file=sys.stderr,
            )
        finally:
            with self._changed:
                if self._pending == snapshot:
                    self._pending = None
                self._changed.notify_all()

    def _try_to_encode(
        self, group: ErasureGroup, snapshot: SnapshotId, stop: threading.Event
    ) -> bool:
        """Fetch the blocks that this node keeps parity of; False if a peer could not be reached."""
        kept = _SnapshotParity(group.stripes, group.position)
        try:
            self._connections.retain_only(group.addresses)
            for stripe, row in group.stripes.parity_stripes(group.position):
                self._encode(group, snapshot, stripe, row, kept, stop)
            with self._changed:
                if stop.is_set() or (group.parity and snapshot not in self._own_tables):
                    return False
                self._parity[snapshot], kept = kept, _SnapshotParity(group.stripes, group.position)
                self._protected.add(snapshot)
        except SnapshotUnavailable:
            self._connections.retain_only(())
            return False
        finally:
            with self._changed:
                self._free += [arena for arena, _ in kept.blocks.values()]
        self._host.on_protected(snapshot)
        return True

    def _encode(
        self,
        group: ErasureGroup,
        snapshot: SnapshotId,
        stripe: int,
        row: int,
        kept: _SnapshotParity,
        stop: threading.Event,
    ) -> None:
        stripes = group.stripes
        positions = [stripes.holder(stripe, number) for number in range(stripes.data)]
        sources = [self._connections.get(group.addresses[position]) for position in positions]
        request = {
            "verb": "stripe",
            "snapshot": [snapshot.generation, snapshot.step],
            "stripe": stripe,
            "offset": 0,
            "background": True,
        }
        for source in sources:
            source.send(request)
        heads = [receive_head(source) for source in sources]
        for position, (message, _) in zip(positions, heads, strict=True):
            kept.tables[position] = tuple(ShardLocation(*part) for part in message["table"])
        nbytes = max(count for _, count in heads)
        arena = self._buffer(nbytes)
        kept.blocks[stripe] = (arena, nbytes)
        coefficients = parity_rows(stripes.data, stripes.parity)[row]
        combine(coefficients, sources, [count for _, count in heads], arena.bytes[:nbytes], stop)

    def _buffer(self, nbytes: int) -> Arena:
        """Return a free parity buffer that is large enough, or a new one."""
        with self._changed:
            fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
            if fitting:
                arena = min(fitting, key=lambda arena: arena.nbytes)
                self._free.remove(arena)
                return arena
        capacity = -(-max(nbytes, 1) // _PARITY_GRANULARITY_NBYTES) * _PARITY_GRANULARITY_NBYTES
        available = psutil.virtual_memory().available
        if capacity + _MEMORY_RESERVE_NBYTES > available:
            raise CheckpointError(
                f"parity needs {capacity / 2**20:.0f} MiB and the node has {available / 2**20:.0f} MiB left; "
                "use larger groups (--group-size) or less parity (--parity)"
            )
        return Arena.create(capacity)

    def _group_of(self, snapshot: SnapshotId) -> ErasureGroup:
        """Return the group that protects a snapshot, waiting for this node to enter its generation."""
        with self._changed:
            kept = self._parity.get(snapshot)
            if kept is not None:
                return ErasureGroup(
                    snapshot.generation,
                    ("",) * kept.stripes.size,
                    kept.position,
                    kept.stripes.parity,
                )
            self._changed.wait_for(
                lambda: self._closing or self._group.generation >= snapshot.generation,
                _ANSWER_TIMEOUT_S,
            )
            if self._group.generation != snapshot.generation:
                raise SnapshotUnavailable(
                    f"step {snapshot.step} of generation {snapshot.generation} is not protected here"
                )
            return self._group

    def _wait_for_own_table(self, snapshot: SnapshotId) -> ShardTable:
        """Return the table of this node's own bytes, waiting for its ranks to seal."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing
                    or snapshot in self._own_tables
                    or self._group.generation > snapshot.generation
                ),
                _ANSWER_TIMEOUT_S,
            )
            if snapshot not in self._own_tables:
                raise SnapshotUnavailable(f"step {snapshot.step} is not sealed here")
            return self._own_tables[snapshot]

    def _compute_shard_table(self, snapshot: SnapshotId) -> ShardTable:
        with self._pinned(snapshot):
            shards = self._host.own_shards(snapshot)
            offsets = accumulate((nbytes for *_, nbytes in shards), initial=0)
            # These threads run at the niceness of who asks: behind training at a seal, but not when a recovery waits for them.
            with ThreadPoolExecutor(
                _CHECKSUM_THREADS, thread_name_prefix="keepstep-check"
            ) as checking:
                checksums = list(
                    checking.map(lambda shard: crc32c.crc32c(shard[1].buffer[: shard[3]]), shards)
                )
            return tuple(
                ShardLocation(rank, offset, nbytes, index_offset, checksum)
                for (rank, _, index_offset, nbytes), offset, checksum in zip(
                    shards, offsets, checksums, strict=False
                )
            )

    def _own_ranges(
        self, snapshot: SnapshotId, start: int, stop: int
    ) -> list[tuple[int, int, int]]:
        """Return (descriptor, offset, count) of each piece of memory that a range of this node's bytes lies in."""
        shards = self._host.own_shards(snapshot)
        bounds = [0]
        for _, _, _, nbytes in shards:
            bounds.append(bounds[-1] + nbytes)
        ranges = []
        for (begin, end), (_, arena, _, _) in zip(pairwise(bounds), shards, strict=True):
            first, last = max(start, begin), min(stop, end)
            if last > first:
                ranges.append((arena.descriptor, first - begin, last - first))
        return ranges

    @contextmanager
    def _pinned(self, snapshot: SnapshotId) -> Iterator[None]:
        self._host.pin(snapshot)
        try:
            yield
        finally:
            self._host.unpin(snapshot)
