"""Rebuilds what a lost node held of a snapshot, from what is left of its erasure group.

Runs in the snapshot server of the node that adopts the lost shards. It asks the remaining nodes for
the table of the lost node's shards and for blocks, and combines these as they arrive. The table has
the shards' checksums, so what is rebuilt is known to be right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Bytes
from keepstep.checkpoint.snapshot.memory.erasure_group import (
    ErasureGroup,
    ShardLocation,
    ShardTable,
    table_nbytes,
)
from keepstep.checkpoint.snapshot.memory.messages import ReadStripe, ReadTable, StripeBytes, Table
from keepstep.checkpoint.snapshot.parity.stripes import Rebuilding, plan_rebuilding
from keepstep.checkpoint.snapshot.server.blocks import (
    ServerConnections,
    combine,
    receive_head,
    send_request,
    stripes_of,
)
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.transport import Identity


@dataclass(frozen=True, slots=True)
class _LostNode:
    """A lost node's part of a snapshot.

    `group` protected it, seen from the lost node; `lost` are the positions of all lost nodes.
    """

    snapshot: SnapshotId
    group: ErasureGroup
    lost: frozenset[int]


class Rebuilder:
    """Owns a thread and its connections. `stop` gives up what is under way, `close` also ends both.

    Args:
        memory: gets the rebuilt shards.
        identity: this node, as other servers see it.
        mark_unprotected: called with a snapshot that could not be rebuilt rightly.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        identity: Identity,
        mark_unprotected: Callable[[SnapshotId], None],
    ) -> None:
        self._memory = memory
        self._mark_unprotected = mark_unprotected
        self._connections = ServerConnections(identity)
        self._stop_requested = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepstep-rebuild")

    def rebuild(
        self, snapshot: SnapshotId, group: ErasureGroup, lost: Collection[int], ranks: Sequence[int]
    ) -> None:
        """Begin to rebuild shards.

        Args:
            snapshot: what they are parts of.
            group: the group that protected it, seen from the node that held the shards
                (`position` is its own).
            lost: positions of all nodes that are lost.
            ranks: whose shards.
        """
        node = _LostNode(snapshot, group, frozenset(lost))
        self._thread.submit(self._rebuild, node, tuple(ranks), self._stop_requested)

    def stop(self) -> None:
        """Give up what is under way, for its generation is over.

        Does not wait: the thread frees the memory that it writes when it notices, before it begins
        another rebuild.
        """
        self._stop_requested.set()
        self._connections.interrupt()
        self._stop_requested = threading.Event()

    def close(self) -> None:
        """Give up what is under way, and end."""
        self.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._connections.retain_only(())

    def _rebuild(self, node: _LostNode, ranks: tuple[int, ...], stop: threading.Event) -> None:
        # An earlier generation may have rebuilt them for the same snapshot.
        missing = [rank for rank in ranks if not self._memory.is_rebuilt(node.snapshot, rank)]
        try:
            table = self._find_table(node, stop) if missing else ()
            for location in table:
                if location.rank in missing:
                    self._rebuild_shard(node, table, location, stop)
                    missing.remove(location.rank)
            if missing:
                raise SnapshotUnavailable(f"the lost node had no shard of rank {missing[0]}")
        except Exception as error:  # noqa: BLE001 - the thread's edge: readers wait
            for rank in missing:
                if stop.is_set():
                    # The next generation may still rebuild it: its readers are not refused.
                    self._memory.abandon_adoption(node.snapshot, rank)
                    continue
                self._memory.fail_adoption(
                    node.snapshot, rank, f"rank {rank}'s shard cannot be rebuilt: {error}"
                )
        finally:
            self._connections.retain_only(())

    def _rebuild_shard(
        self, node: _LostNode, table: ShardTable, location: ShardLocation, stop: threading.Event
    ) -> None:
        arena = self._memory.adopt(node.snapshot, location.rank, location.nbytes, stop.is_set)
        plan = plan_rebuilding(
            stripes_of(node.group),
            node.lost,
            node.group.position,
            table_nbytes(table),
            location.offset,
            location.offset + location.nbytes,
        )
        for piece in plan:
            target = arena.bytes[piece.offset - location.offset :][: piece.count]
            _check_not_stopped(stop)
            self._rebuild_piece(node, piece, target, stop)
        if crc32c.crc32c(arena.buffer[: location.nbytes]) != location.crc:
            # It will be wrong the next time too: the next decision must not count on it.
            self._mark_unprotected(node.snapshot)
            raise SnapshotUnavailable(
                "its checksum is wrong, so a block it was rebuilt from is damaged"
            )
        self._memory.complete_adoption(node.snapshot, location)

    def _rebuild_piece(
        self, node: _LostNode, piece: Rebuilding, target: Bytes, stop: threading.Event
    ) -> None:
        sources = [
            self._connections.get(node.group.addresses[position]) for position in piece.sources
        ]
        request = ReadStripe(
            snapshot=node.snapshot,
            stripe=piece.stripe,
            offset=piece.block_offset,
            count=piece.count,
        )
        for source in sources:
            send_request(source, request)
        counts = [receive_head(source, StripeBytes)[1] for source in sources]
        combine(piece.coefficients, sources, counts, target, stop)

    def _find_table(self, node: _LostNode, stop: threading.Event) -> ShardTable:
        """Ask the remaining nodes of the group, one after the other, where the shards were."""
        request = ReadTable(snapshot=node.snapshot, position=node.group.position)
        refusals = []
        for position, address in enumerate(node.group.addresses):
            if position in node.lost:
                continue
            _check_not_stopped(stop)
            try:
                source = self._connections.get(address)
                send_request(source, request)
                return receive_head(source, Table)[0].table
            except SnapshotUnavailable as error:
                refusals.append(str(error))
        raise SnapshotUnavailable("; ".join(refusals))


def _check_not_stopped(stop: threading.Event) -> None:
    if stop.is_set():
        raise SnapshotUnavailable("the generation is over")
