"""Protects snapshots: computes this node's parity of other nodes' snapshots.

When all ranks of a node have sealed a snapshot, its server reads the blocks whose parity it keeps
from the other nodes of its erasure group (`checkpoint.snapshot.parity.stripes` decides which), and
combines them as they arrive. A server that is asked for a block answers once its own ranks have
sealed: a slow node delays the snapshot's commit and nothing else. A snapshot is protected here once
all this node's parity of it is complete. When it is protected on all nodes, any loss up to the
parity can be made good (`keepstep.checkpoint.snapshot.server.rebuilding`), and it is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import accumulate

import crc32c

from keepstep.checkpoint.errors import CheckpointError, SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.erasure_group import (
    ErasureGroup,
    ShardLocation,
    ShardTable,
)
from keepstep.checkpoint.snapshot.memory.messages import ReadStripe, StripeBytes
from keepstep.checkpoint.snapshot.parity.erasure import parity_rows
from keepstep.checkpoint.snapshot.server.blocks import (
    ServerConnections,
    SnapshotIncomplete,
    combine,
    receive_head,
    send_request,
    stripes_of,
)
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.checkpoint.snapshot.server.parity_memory import ParityMemory, SnapshotParity
from keepstep.checkpoint.snapshot.server.snapshot_memory import OwnShard, SnapshotMemory
from keepstep.processes import yield_to_training
from keepstep.transport import FileRange, Identity, PeerUnavailable

_RETRY_S = 0.1

_OBSTACLE_LASTS_S = 10.0
"""After this long an obstacle is reported: one that a node's loss causes passes sooner."""

# A core reads its share of the memory bus; more threads than these add nothing.
_CHECKSUM_THREADS = 8

log = logging.getLogger("keepstep")


class Protection:
    """Owns the parity, the thread that computes it, and its connections.

    `stop` ends what is under way and every wait; then `close` frees the memory.

    Args:
        memory: holds the node's own shards.
        identity: this node, as other servers see it.
        budget: the node's memory.
        on_protected: called when a snapshot is protected here, on the computing thread; without
            parity, by `protect`.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        identity: Identity,
        budget: MemoryBudget,
        on_protected: Callable[[SnapshotId], None],
    ) -> None:
        self._memory = memory
        self._on_protected = on_protected
        self._parity = ParityMemory(memory, budget)
        self._changed = threading.Condition()
        self._pending: SnapshotId | None = None
        self._stop_requested = threading.Event()
        # Set once what is under way for this snapshot is in vain: its shards are taken again.
        self._given_up: tuple[SnapshotId, threading.Event] | None = None
        self._connections = ServerConnections(identity)
        # What is in the way of the snapshot that is being protected, as it was logged last.
        self._obstacle: tuple[SnapshotId, str] | None = None
        self._encoding = ThreadPoolExecutor(
            1, thread_name_prefix="keepstep-parity", initializer=yield_to_training
        )

    @property
    def nbytes(self) -> int:
        """Memory of all parity buffers."""
        return self._parity.nbytes

    @property
    def peers(self) -> int:
        """Number of other nodes in this node's group."""
        return len(self._parity.group.addresses) - 1

    def is_protected(self, snapshot: SnapshotId) -> bool:
        """Whether this node's part in protecting a snapshot is complete."""
        return self._parity.is_protected(snapshot)

    def mark_unprotected(self, snapshot: SnapshotId) -> None:
        """Do not count on a snapshot's parity any more, for a block of it is damaged."""
        self._parity.mark_unprotected(snapshot)

    def open_generation(self, group: ErasureGroup) -> None:
        """Protect the snapshots of another generation, and give up what is under way for the last.

        After this returns nothing of older generations becomes protected.
        """
        self._stop_requested.set()
        self._connections.interrupt()
        with self._changed:
            self._stop_requested = threading.Event()
            self._parity.open_generation(group)
            self._set_pending(None)

    def protect(self, snapshot: SnapshotId) -> None:
        """Begin to protect a snapshot that all ranks of this node have sealed.

        Nothing happens if its generation is over: no other node would give its part of it. Without
        parity nothing is to be computed, and the snapshot counts as protected when this returns.
        """
        with self._changed:
            group = self._parity.group
            if snapshot.generation < group.generation:
                return
            if group.parity:
                self._pending = snapshot
                given_up = threading.Event()
                self._given_up = snapshot, given_up
                self._encoding.submit(
                    self._protect, group, snapshot, self._stop_requested, given_up
                )
                return
            is_published = self._parity.publish(snapshot, SnapshotParity(group))
        if is_published:
            self._on_protected(snapshot)

    def finish_protection(self, sealed: Collection[SnapshotId], timeout_s: float) -> None:
        """Wait until nothing is under way that can be completed, or the time is up.

        For the end of a generation, once this node's ranks seal nothing more: other nodes do not
        wait any longer for what they have not sealed.

        Args:
            sealed: the snapshots that all of the node's ranks have sealed.
            timeout_s: how long to wait, in seconds.
        """
        self._parity.end_generation(sealed)
        with self._changed:
            self._changed.wait_for(lambda: self._pending is None, timeout_s)

    def retain_only(self, snapshots: Collection[SnapshotId]) -> None:
        """Forget everything about other snapshots than these."""
        with self._changed:
            if self._given_up is not None and self._given_up[0] not in snapshots:
                self._given_up[1].set()
        if self._parity.retain_only(snapshots):
            self._connections.interrupt()

    def stripe(
        self, request: ReadStripe
    ) -> AbstractContextManager[tuple[ShardTable | None, list[FileRange]]]:
        """Return bytes of a stripe's block, as `ParityMemory.stripe` does."""
        return self._parity.stripe(request)

    def table(self, snapshot: SnapshotId, position: int) -> ShardTable:
        """Return where another node has its shards, as `ParityMemory.table` does."""
        return self._parity.table(snapshot, position)

    def is_intact(self, snapshot: SnapshotId) -> bool:
        """Whether the shards that this node holds of a snapshot are as they were sealed.

        True if that is not known, because the snapshot is not protected by parity.
        """
        sealed = self._parity.own_table(snapshot)
        if sealed is None:
            return True
        crcs = {shard.rank: shard.crc for shard in sealed}
        held = self._compute_shard_table(snapshot)
        return all(crcs.get(shard.rank, shard.crc) == shard.crc for shard in held)

    def is_complete(self, snapshot: SnapshotId) -> bool:
        """Whether this node holds all shards that its ranks sealed, as far as that is known."""
        sealed = self._parity.own_table(snapshot)
        held = {shard.rank for shard in self._memory.own_shards(snapshot)}
        return sealed is None or held == {shard.rank for shard in sealed}

    def stop(self) -> None:
        """Give up what is under way, and end all waits."""
        self._stop_requested.set()
        self._parity.stop()
        self._connections.interrupt()
        self._encoding.shutdown(wait=True, cancel_futures=True)
        self._connections.retain_only(())

    def close(self) -> None:
        """Free everything, after `stop`."""
        self._parity.close()

    def _protect(
        self,
        group: ErasureGroup,
        snapshot: SnapshotId,
        stop: threading.Event,
        given_up: threading.Event,
    ) -> None:
        """Compute the table of this node's own bytes, then the parity of the others'.

        What is in the way may pass: until the snapshot is protected, no newer one is taken.
        """
        has_table = False
        hindered_at_s: float | None = None
        try:
            while not (stop.is_set() or given_up.is_set()):
                try:
                    if not has_table:
                        table = self._compute_shard_table(snapshot)
                        with self._changed:
                            if given_up.is_set():
                                return
                            self._parity.set_own_table(snapshot, table)
                        has_table = True
                    if self._encode_all(group, snapshot, stop):
                        self._on_protected(snapshot)
                        return
                except Exception as error:  # noqa: BLE001 - nobody else would learn of it
                    if not has_table and isinstance(error, SnapshotUnavailable):
                        log.error("step %d is not protected: %s", snapshot.step, error)
                        return
                    if not stop.is_set():
                        now_s = time.monotonic()
                        if hindered_at_s is None:
                            hindered_at_s = now_s
                        self._note_obstacle(snapshot, error, now_s - hindered_at_s)
                    self._connections.retain_only(())
                if has_table and self._parity.own_table(snapshot) is None:
                    return
                # Meanwhile agents find out whether the peer is dead; if so this generation ends.
                self._set_pending(None)
                stop.wait(_RETRY_S)
        finally:
            with self._changed:
                # Not if the same snapshot is being protected again.
                if self._pending == snapshot and self._given_up == (snapshot, given_up):
                    self._set_pending(None)

    def _encode_all(self, group: ErasureGroup, snapshot: SnapshotId, stop: threading.Event) -> bool:
        """Compute all parity that this node keeps; False if the snapshot was given up meanwhile."""
        parity = SnapshotParity(group)
        is_published = False
        try:
            self._connections.retain_only(group.addresses)
            for stripe, row in stripes_of(group).parity_stripes(group.position):
                self._encode(parity, snapshot, stripe, row, stop)
            is_published = self._parity.publish(snapshot, parity)
        finally:
            if not is_published:
                self._parity.release(parity)
        return is_published

    def _note_obstacle(self, snapshot: SnapshotId, error: Exception, hindered_s: float) -> None:
        """Log what is in the way, once if it lasts. Of a failure among the peers the agents learn.

        Args:
            snapshot: what is not protected.
            error: what is in the way now.
            hindered_s: seconds since anything came in the way.
        """
        if hindered_s < _OBSTACLE_LASTS_S:
            log.debug("step %d is not protected yet, trying again: %s", snapshot.step, error)
            return
        text = str(error) if isinstance(error, CheckpointError | OSError) else repr(error)
        obstacle = (snapshot, text)
        is_failure = isinstance(error, SnapshotIncomplete) or isinstance(
            error.__cause__, PeerUnavailable
        )
        if not is_failure and obstacle != self._obstacle:
            self._obstacle = obstacle
            log.warning("step %d is not protected yet, trying again: %s", snapshot.step, text)

    def _encode(
        self,
        parity: SnapshotParity,
        snapshot: SnapshotId,
        stripe: int,
        row: int,
        stop: threading.Event,
    ) -> None:
        """Compute one parity block into a new buffer of `parity`."""
        group, stripes = parity.group, stripes_of(parity.group)
        positions = [stripes.holder(stripe, number) for number in range(stripes.data)]
        sources = [self._connections.get(group.addresses[position]) for position in positions]
        request = ReadStripe(snapshot=snapshot, stripe=stripe, background=True)
        for source in sources:
            send_request(source, request)
        heads = [receive_head(source, StripeBytes) for source in sources]
        for position, (reply, _) in zip(positions, heads, strict=True):
            if reply.table is None:
                raise SnapshotUnavailable(
                    f"{group.addresses[position]}: sent a data block without its table"
                )
            parity.tables[position] = reply.table
        counts = [count for _, count in heads]
        nbytes = max(counts)
        arena = self._parity.take_buffer(nbytes)
        parity.blocks[stripe] = (arena, nbytes)
        coefficients = parity_rows(stripes.data, stripes.parity)[row]
        combine(coefficients, sources, counts, arena.bytes[:nbytes], stop)

    def _set_pending(self, snapshot: SnapshotId | None) -> None:
        with self._changed:
            self._pending = snapshot
            self._changed.notify_all()

    def _compute_shard_table(self, snapshot: SnapshotId) -> ShardTable:
        def checksum(shard: OwnShard) -> int:
            return int(crc32c.crc32c(shard.arena.buffer[: shard.nbytes]))

        with self._memory.pinned(snapshot):
            shards = self._memory.own_shards(snapshot)
            # These threads inherit the caller's niceness: low behind training at a seal, normal
            # when a recovery waits for them.
            with ThreadPoolExecutor(
                _CHECKSUM_THREADS, thread_name_prefix="keepstep-check"
            ) as checking:
                checksums = list(checking.map(checksum, shards))
        offsets = accumulate((shard.nbytes for shard in shards), initial=0)
        return tuple(
            ShardLocation(
                rank=shard.rank,
                offset=offset,
                nbytes=shard.nbytes,
                index_offset=shard.index_offset,
                crc=crc,
            )
            for shard, offset, crc in zip(shards, offsets, checksums, strict=False)
        )
