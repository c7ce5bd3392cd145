"""Answers the requests of one client of the snapshot server: a worker, or another node's server."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from keepstep.checkpoint.errors import CheckpointError, SnapshotInvariantViolated
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import box_bytes, contiguous_range, contiguous_tiles
from keepstep.checkpoint.snapshot.memory.messages import (
    Begin,
    Begun,
    BoxBytes,
    ClientRequest,
    Holdings,
    IndexBytes,
    IndexPending,
    ListHoldings,
    Opened,
    OpenShard,
    PlanBytes,
    PlanPending,
    ReadBoxes,
    ReadIndex,
    ReadPlan,
    ReadStripe,
    ReadTable,
    Refused,
    Seal,
    Sealed,
    ServerReply,
    StripeBytes,
    Table,
)
from keepstep.checkpoint.snapshot.server.blocks import SnapshotIncomplete
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.protection import Protection
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.transport import Connection, FileRange, MalformedMessage

# Scattered boxes are copied in tiles of about this size, each sent before the next is copied.
_COPIED_NBYTES = 4 * 2**20

log = logging.getLogger("keepstep")


class ClientSession:
    """Converses with one client, from its first request until its connection ends.

    Args:
        client: the connection.
        memory: the node's snapshots.
        protection: their parity.
        plan_outbox: has what others need to plan a checkpoint.
        on_sealed: called when the client has sealed a shard of a snapshot, with the ranks of the
            node that had sealed it then.
        background_rate: returns the bytes per second that this connection may send in the
            background of the training; 0 is no limit.
    """

    def __init__(
        self,
        client: Connection[ServerReply, ClientRequest],
        memory: SnapshotMemory,
        protection: Protection,
        plan_outbox: PlanOutbox,
        on_sealed: Callable[[SnapshotId, frozenset[int]], None],
        background_rate: Callable[[], int],
    ) -> None:
        self._client = client
        self._memory = memory
        self._protection = protection
        self._plan_outbox = plan_outbox
        self._on_sealed = on_sealed
        self._background_rate = background_rate
        self._unsealed: set[tuple[SnapshotId, int]] = set()

    def run(self) -> None:
        """Answer until the connection ends; then forget the shards that were left unsealed."""
        try:
            while (request := self._receive()) is not None:
                try:
                    self._answer(request)
                except (CheckpointError, ValueError, OSError) as error:
                    if isinstance(error, SnapshotInvariantViolated):
                        log.error("a request of %s was refused: %s", self._client.peer, error)
                    is_incomplete = isinstance(error, SnapshotIncomplete)
                    self._client.send(Refused(reason=str(error), is_incomplete=is_incomplete))
        finally:
            for snapshot, rank in self._unsealed:
                self._memory.abandon(snapshot, rank)

    def _receive(self) -> ClientRequest | None:
        """Return the next request; refuse messages that this version does not know."""
        while True:
            try:
                return self._client.receive()
            except MalformedMessage as error:
                # If what came was no whole frame, the connection has ended, and so will this.
                log.warning("refused a request: %s", error)
                self._client.send(Refused(reason=str(error)))

    def _answer(self, request: ClientRequest) -> None:
        match request:
            case Begin():
                self._begin(request)
            case Seal(snapshot=snapshot, rank=rank):
                sealed = self._memory.seal(
                    snapshot, rank, request.index_offset, request.index_nbytes
                )
                self._unsealed.discard((snapshot, rank))
                self._client.send(Sealed())
                self._on_sealed(snapshot, sealed)
            case ListHoldings():
                self._client.send(Holdings(sealed=self._memory.sealed()))
            case ReadIndex(snapshot=snapshot, rank=rank, wait=wait):
                if wait and self._memory.is_pending(snapshot, rank):
                    self._client.send(IndexPending())
                else:
                    self._send_index(snapshot, rank)
            case OpenShard(snapshot=snapshot, rank=rank):
                capacity, descriptor = self._memory.open_shard(snapshot, rank)
                self._send_with_descriptor(Opened(capacity=capacity), descriptor)
            case ReadBoxes():
                self._limit(background=request.background)
                self._send_boxes(request)
            case ReadStripe():
                self._limit(background=request.background)
                with self._protection.stripe(request) as (table, ranges):
                    self._client.send_files(StripeBytes(table=table), ranges)
            case ReadTable(snapshot=snapshot, position=position):
                self._client.send(Table(table=self._protection.table(snapshot, position)))
            case ReadPlan():
                message = self._plan_outbox.read_plan(request)
                if message is None:
                    self._client.send(PlanPending())
                else:
                    self._client.send(PlanBytes(), [message])

    def _begin(self, request: Begin) -> None:
        given = self._memory.begin(
            request.snapshot,
            request.rank,
            request.nbytes,
            request.mapped,
            discard_uncommitted=request.discard_uncommitted,
        )
        self._unsealed.add((request.snapshot, request.rank))
        self._send_with_descriptor(
            Begun(buffer=given.buffer, capacity=given.capacity, dropped=given.dropped),
            given.descriptor,
        )

    def _send_with_descriptor(self, reply: ServerReply, descriptor: int | None) -> None:
        """Send a reply with a descriptor, and close this process's duplicate of it."""
        try:
            self._client.send(reply, descriptor=descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _send_index(self, snapshot: SnapshotId, rank: int) -> None:
        with self._memory.pinned(snapshot):
            self._client.send_files(IndexBytes(), [self._memory.index_range(snapshot, rank)])

    def _send_boxes(self, request: ReadBoxes) -> None:
        """Send boxes; the kernel copies those that are contiguous in memory to the socket."""
        with self._memory.pinned(request.snapshot):
            # All are found before the first is sent: half a reply cannot be taken back.
            found = [
                (*self._memory.find_box(request.snapshot, wanted), wanted.box)
                for wanted in request.boxes
            ]
            views = [box_bytes(entry, arena.bytes, box) for entry, arena, box in found]

            def pieces() -> Iterator[FileRange | memoryview]:
                for (entry, arena, box), view in zip(found, views, strict=True):
                    contiguous = contiguous_range(entry, box)
                    if contiguous is not None:
                        yield arena.range(*contiguous)
                    else:
                        yield from contiguous_tiles(view, _COPIED_NBYTES)

            self._client.send_pieces(BoxBytes(), sum(view.nbytes for view in views), pieces())

    def _limit(self, *, background: bool) -> None:
        self._client.limit(self._background_rate() if background else 0)
