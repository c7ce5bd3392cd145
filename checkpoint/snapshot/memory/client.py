"""Connects to a snapshot server: workers of its node share its memory, other ranks read bytes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import DecodedIndex, ShardIndex, decode_index
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.checkpoint.snapshot.memory.messages import (
    MAX_INDEX_NBYTES,
    SNAPSHOT_PROTOCOL,
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
    Refused,
    Seal,
    Sealed,
    ServerReply,
    ShardBox,
)
from keepstep.transport import Identity, TransportError, connect

_IDLE_S = 30.0

ReplyT = TypeVar("ReplyT", bound=ServerReply)


class SnapshotClient:
    """One connection to a snapshot server, for one thread at a time. `close` ends it.

    After an error of the connection every call raises SnapshotUnavailable.

    Args:
        address: `unix:PATH` or `tcp:HOST:PORT`.
        secret: the job's.
        idle_s: how long to wait while not a byte moves.
        node: how the server's log names this client; by default the host's name.

    Raises:
        SnapshotUnavailable: no snapshot server of this job answers there.
    """

    def __init__(
        self, address: str, secret: bytes, idle_s: float = _IDLE_S, *, node: str = ""
    ) -> None:
        self.address = address
        identity = Identity(node or socket.gethostname(), secret)
        with translated_transport_errors():
            self._connection = connect(address, SNAPSHOT_PROTOCOL, identity, idle_s=idle_s)
        self._arenas: dict[int, Arena] = {}

    def begin(
        self,
        snapshot: SnapshotId,
        rank: int,
        nbytes: int,
        *,
        discard_uncommitted: bool = False,
        before_unmap: Callable[[int], None] = lambda _: None,
    ) -> tuple[int, Arena]:
        """Ask for a buffer to write a shard into; return its number and memory.

        The same number means the same memory as before, still mapped. The client unmaps it when the
        server has released it, or when it is closed itself.

        Args:
            snapshot: what the shard is a part of.
            rank: whose part.
            nbytes: its size, index included.
            discard_uncommitted: forget the rank's last snapshot, which another rank has not sealed
                and never will.
            before_unmap: called with the number of each buffer that the server has released; must
                let go of all that uses its memory.

        Raises:
            SnapshotUnavailable: the generation is over, the rank's last snapshot is not committed,
                memory is short, or the server is gone.
        """
        begun = self._ask(
            Begin(
                snapshot=snapshot,
                rank=rank,
                nbytes=nbytes,
                mapped=tuple(self._arenas),
                discard_uncommitted=discard_uncommitted,
            ),
            Begun,
        )
        for number in begun.dropped:
            if number in self._arenas:
                before_unmap(number)
                self._arenas.pop(number).close()
        if begun.buffer not in self._arenas:
            self._arenas[begun.buffer] = self._map(begun.capacity, writable=True)
        return begun.buffer, self._arenas[begun.buffer]

    def seal(self, snapshot: SnapshotId, rank: int, index_offset: int, index_nbytes: int) -> None:
        """Declare a shard complete, whose index lies at this place in its buffer.

        Raises as `begin` does.
        """
        request = Seal(
            snapshot=snapshot, rank=rank, index_offset=index_offset, index_nbytes=index_nbytes
        )
        self._ask(request, Sealed)

    def holdings(self) -> dict[SnapshotId, list[int]]:
        """Return the ranks that have sealed each snapshot held."""
        holdings = self._ask(ListHoldings(), Holdings)
        return {sealed.snapshot: list(sealed.ranks) for sealed in holdings.sealed}

    def index(self, snapshot: SnapshotId, rank: int, *, wait: bool = False) -> ShardIndex:
        """Return what a sealed shard holds; with `wait`, once it has been rebuilt there."""
        request = ReadIndex(snapshot=snapshot, rank=rank, wait=wait)
        reply: ServerReply = IndexPending()
        while isinstance(reply, IndexPending):
            reply, encoded = self._ask_with_payload(request, IndexBytes, IndexPending)
        return read_index(encoded, rank).index

    def read_plan(self, request: ReadPlan) -> bytes | None:
        """Return what the server has to plan a checkpoint with; None if it has to be asked again.

        It waits a while before that.
        """
        reply: ServerReply
        reply, message = self._ask_with_payload(request, PlanBytes, PlanPending)
        return bytes(message) if isinstance(reply, PlanBytes) else None

    def open(self, snapshot: SnapshotId, rank: int) -> Arena:
        """Map a sealed shard for reading (only on the server's node). The caller closes it."""
        opened = self._ask(OpenShard(snapshot=snapshot, rank=rank), Opened)
        return self._map(opened.capacity, writable=False)

    def read(
        self,
        snapshot: SnapshotId,
        boxes: Sequence[ShardBox],
        into: Sequence[memoryview],
        *,
        background: bool = False,
    ) -> None:
        """Read boxes of sealed shards, one after the other, into buffers of their sizes.

        With `background` the server keeps to its rate limit for background traffic.
        """
        request = ReadBoxes(snapshot=snapshot, boxes=tuple(boxes), background=background)
        self._ask(request, BoxBytes, into=lambda _: into)

    def close(self) -> None:
        """End the connection and unmap everything that `begin` mapped."""
        self._connection.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _map(self, capacity: int, *, writable: bool) -> Arena:
        with translated_transport_errors():
            descriptor = self._connection.take_descriptor()
        return Arena.map(descriptor, capacity, writable=writable)

    def _ask_with_payload(
        self, request: ClientRequest, *expected: type[ReplyT]
    ) -> tuple[ReplyT, bytearray]:
        """Send a request and return its reply and payload."""
        payload = bytearray()

        def allocate(nbytes: int) -> Sequence[memoryview]:
            if nbytes > MAX_INDEX_NBYTES:
                return ()
            payload.extend(bytes(nbytes))
            return (memoryview(payload),)

        return self._ask(request, *expected, into=allocate), payload

    def _ask(
        self,
        request: ClientRequest,
        *expected: type[ReplyT],
        into: Callable[[int], Sequence[memoryview]] = lambda _: (),
    ) -> ReplyT:
        """Send a request and return its reply; `into` returns the buffers for a payload's size."""

        def buffers(reply: ServerReply, nbytes: int) -> Sequence[memoryview]:
            return into(nbytes) if isinstance(reply, expected) else ()

        try:
            with translated_transport_errors():
                self._connection.send(request)
                reply = self._connection.receive(buffers)
        except BaseException:
            # The reply may still come: it would be taken for the next request's.
            self._connection.interrupt()
            raise
        match reply:
            case None:
                raise SnapshotUnavailable(f"the snapshot server at {self.address} is gone")
            case Refused(reason=reason):
                raise SnapshotUnavailable(reason)
            case _ if isinstance(reply, expected):
                return reply
            case _:
                raise SnapshotUnavailable(
                    f"the snapshot server at {self.address} answered {type(request).__name__} by "
                    f"{type(reply).__name__}; run one version of keepstep on all nodes"
                )


@contextmanager
def translated_transport_errors() -> Iterator[None]:
    """Raise SnapshotUnavailable for errors of the connection to a snapshot server."""
    try:
        yield
    except TransportError as error:
        raise SnapshotUnavailable(f"snapshot server: {error}") from error


def read_index(
    encoded: bytes | bytearray | memoryview, rank: int, known: DecodedIndex | None = None
) -> DecodedIndex:
    """Return the index of a rank's shard, as `decode_index` does.

    Raises:
        SnapshotUnavailable: the bytes are no index.
    """
    try:
        return decode_index(bytes(encoded), known)
    except (ValueError, TypeError, RecursionError) as error:
        raise SnapshotUnavailable(
            f"the index of rank {rank}'s shard cannot be read ({error!r:.200}); "
            f"its memory is damaged, or its writer runs another version of keepstep"
        ) from error
