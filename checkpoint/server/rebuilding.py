"""Rebuilding what a lost node held of a snapshot, from what is left of its erasure group.

Runs in the snapshot server of the node that adopts the lost shards: it asks those that are left for the table of the lost node's shards and
for the blocks, and combines them as they arrive. The table has the shards' checksums, so what is rebuilt is known to be right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import crc32c

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.memory.arena import Arena, Bytes
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.parity.stripes import Rebuilding, plan_rebuilding
from keepstep.checkpoint.server.blocks import (
    ErasureGroup,
    ServerConnections,
    ShardLocation,
    ShardTable,
    combine,
    receive_head,
    table_nbytes,
)


class RebuildingHost(Protocol):
    """What rebuilding needs of the server it runs in."""

    def adopt(self, snapshot: SnapshotId, rank: int, nbytes: int) -> Arena:
        """Return memory for a lost node's shard."""
        ...

    def complete_adoption(self, snapshot: SnapshotId, part: ShardLocation) -> None:
        """Take a rebuilt shard for one that is held here."""
        ...

    def fail_adoption(self, snapshot: SnapshotId, rank: int, reason: str) -> None:
        """Tell whoever waits for a shard that it will not come."""
        ...


class Rebuilder:
    """Owns a thread and its connections. `close` ends both."""

    def __init__(
        self, host: RebuildingHost, secret: bytes, mark_unprotected: Callable[[SnapshotId], None]
    ) -> None:
        self._host = host
        self._mark_unprotected = mark_unprotected
        self._connections = ServerConnections(secret)
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepstep-rebuild")

    def rebuild(
        self, snapshot: SnapshotId, group: ErasureGroup, lost: Collection[int], ranks: Sequence[int]
    ) -> None:
        """Begin to rebuild shards.

        Args:
            snapshot: of which step.
            group: the group that protected it, seen from the node that held the shards (`position` is its own).
            lost: positions of all nodes that are lost.
            ranks: whose shards.
        """
        self._thread.submit(self._rebuild, snapshot, group, frozenset(lost), tuple(ranks))

    def close(self) -> None:
        """Give up what is under way."""
        self._stop.set()
        self._connections.interrupt()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._connections.retain_only(())

    def _rebuild(
        self,
        snapshot: SnapshotId,
        group: ErasureGroup,
        lost: frozenset[int],
        ranks: tuple[int, ...],
    ) -> None:
        left = list(ranks)
        try:
            table = self._find_table(snapshot, group, lost)
            for part in table:
                if part.rank in left:
                    self._rebuild_part(snapshot, group, lost, table, part)
                    left.remove(part.rank)
            if left:
                raise SnapshotUnavailable(f"the lost node had no shard of rank {left[0]}")
        except Exception as error:  # noqa: BLE001 - the thread's edge: whatever went wrong, those who wait must hear of it
            for rank in left:
                self._host.fail_adoption(
                    snapshot, rank, f"rank {rank}'s shard cannot be rebuilt: {error}"
                )
        finally:
            self._connections.retain_only(())

    def _rebuild_part(
        self,
        snapshot: SnapshotId,
        group: ErasureGroup,
        lost: frozenset[int],
        table: ShardTable,
        part: ShardLocation,
    ) -> None:
        arena = self._host.adopt(snapshot, part.rank, part.nbytes)
        plan = plan_rebuilding(
            group.stripes,
            lost,
            group.position,
            table_nbytes(table),
            part.offset,
            part.offset + part.nbytes,
        )
        for piece in plan:
            target = arena.bytes[piece.offset - part.offset :][: piece.count]
            self._rebuild_piece(snapshot, group, piece, target)
        if crc32c.crc32c(arena.buffer[: part.nbytes]) != part.crc:
            # Whatever is wrong, it will be so the next time: the next decision must not count on it.
            self._mark_unprotected(snapshot)
            raise SnapshotUnavailable(
                "its checksum is wrong, so a block it was rebuilt from is damaged"
            )
        self._host.complete_adoption(snapshot, part)

    def _rebuild_piece(
        self, snapshot: SnapshotId, group: ErasureGroup, piece: Rebuilding, target: Bytes
    ) -> None:
        sources = [self._connections.get(group.addresses[position]) for position in piece.sources]
        for source in sources:
            source.send({
                "verb": "stripe",
                "snapshot": [snapshot.generation, snapshot.step],
                "stripe": piece.stripe,
                "offset": piece.block_offset,
                "count": piece.count,
            })  # fmt: skip
        counts = [receive_head(source)[1] for source in sources]
        combine(piece.coefficients, sources, counts, target, self._stop)

    def _find_table(
        self, snapshot: SnapshotId, group: ErasureGroup, lost: frozenset[int]
    ) -> ShardTable:
        """Ask whoever is left of a group where the lost node had its shards."""
        request = {
            "verb": "table",
            "snapshot": [snapshot.generation, snapshot.step],
            "position": group.position,
        }
        refusals = []
        for position, address in enumerate(group.addresses):
            if position not in lost:
                source = self._connections.get(address)
                source.send(request)
                try:
                    message, _ = receive_head(source)
                except SnapshotUnavailable as error:
                    refusals.append(str(error))
                    continue
                return tuple(ShardLocation(*part) for part in message["table"])
        raise SnapshotUnavailable("; ".join(refusals))
