"""Carries typed messages, payloads and file descriptors over a blocking connection.

`blocking_handshake` makes authenticated connections; `Connection.over_pair` wraps one end of a
socket pair that two processes inherited, which needs no authentication. Both speak the frames of
`frames`, with their promises.

One thread may send while another one receives; neither direction is for two threads at a time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Self

from keepstep.transport.blocking_socket import BlockingSocket
from keepstep.transport.codec import Buffer
from keepstep.transport.errors import ConnectionLost, MalformedMessage
from keepstep.transport.frames import FrameFlags, FrameHead, FrameOpener, FrameSealer
from keepstep.transport.handshake import AuthenticatedPeer
from keepstep.transport.keys import NO_KEYS
from keepstep.transport.protocol import ReceivedT, SentT, Side

# Bytes are covered by the tag and sent while a core's cache has them.
_TILE_NBYTES = 2**18

# The most that one receive takes, and is covered at once. Each receive has the kernel announce a
# new window: receives of 256 KiB took half as much processor time again as these, measured with
# parity of 256 MiB per node over the loopback.
_RECEIVE_NBYTES = 2**22


@dataclass(frozen=True, slots=True)
class FileRange:
    """A byte range of a file, to be sent without copying it.

    Args:
        descriptor: the open file.
        offset: where the range begins, in bytes.
        view: the same bytes mapped into memory; they are what the tag is computed over. If the
            file changes while it is sent, the receiver refuses the payload.
    """

    descriptor: int
    offset: int
    view: memoryview


class Connection(Generic[SentT, ReceivedT]):
    """One connection. Made by `connect`, `accept` or `over_pair`; `close` ends it.

    Attributes:
        peer: the other end's name in errors.
        peer_node: the job's node that the other end proved to be; "" over a socket pair.
        version: the protocol version that both ends speak.
    """

    def __init__(
        self,
        connection: BlockingSocket,
        side: Side[SentT, ReceivedT],
        authenticated: AuthenticatedPeer | None,
    ) -> None:
        self._socket = connection
        self._side = side
        keys = NO_KEYS if authenticated is None else authenticated.keys
        self.peer = connection.peer
        self.peer_node = "" if authenticated is None else authenticated.node
        self.version = side.versions.newest if authenticated is None else authenticated.version
        self._sealer = FrameSealer(keys.send, side.max_body_nbytes)
        self._opener = FrameOpener(keys.receive, side.max_body_nbytes, self.peer)
        self._descriptors: list[int] = []

    @classmethod
    def over_pair(cls, end: socket.socket, side: Side[SentT, ReceivedT], peer: str) -> Self:
        """Wrap one end of a socket pair that only this process and its peer have."""
        return cls(BlockingSocket(end, peer), side, None)

    def set_idle_limit(self, idle_s: float | None) -> None:
        """Limit the waits of either direction while not a byte moves; None waits forever."""
        self._socket.sending.idle_s = self._socket.receiving.idle_s = idle_s

    def set_sending_limit(self, idle_s: float) -> None:
        """Limit the waits of sending while not a byte moves; receiving waits as before."""
        self._socket.sending.idle_s = idle_s

    def set_deadline(self, deadline_s: float | None) -> None:
        """Set the instant of `time.monotonic` after which nothing waits; None lifts it."""
        self._socket.sending.deadline_s = self._socket.receiving.deadline_s = deadline_s

    def send(
        self, message: SentT, payload: Sequence[Buffer] = (), descriptor: int | None = None
    ) -> None:
        """Send one frame, with a descriptor riding on it if given (Unix sockets only).

        The payload must not change before this returns.

        Raises:
            ConnectionLost, PeerTimeout: the frame was not sent whole; the connection has ended.
            MessageTooLarge: nothing was sent.
        """
        parts = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
        if not parts:
            self._send_head(message, 0, descriptor)
            return
        with self._frame(message, sum(part.nbytes for part in parts), descriptor):
            for part in parts:
                for tile in _tiles(part):
                    self._sealer.cover(tile)
                    self._socket.send_all([tile])

    def send_files(self, message: SentT, ranges: Sequence[FileRange]) -> None:
        """Send one frame whose payload is byte ranges of files, copied by the kernel.

        Raises as `send` does.
        """
        self.send_pieces(message, sum(piece.view.nbytes for piece in ranges), ranges)

    def send_pieces(
        self, message: SentT, nbytes: int, pieces: Iterable[FileRange | memoryview]
    ) -> None:
        """Send one frame whose payload of `nbytes` is made piece by piece, as each is sent.

        Byte ranges of files are copied by the kernel. Raises as `send` does.
        """
        with self._frame(message, nbytes, None):
            left = nbytes
            for piece in pieces:
                view = piece.view if isinstance(piece, FileRange) else piece
                left -= view.nbytes
                offset = piece.offset if isinstance(piece, FileRange) else 0
                for tile in _tiles(view.cast("B")):
                    self._sealer.cover(tile)
                    if isinstance(piece, FileRange):
                        self._socket.send_file(piece.descriptor, offset, tile.nbytes)
                    else:
                        self._socket.send_all([tile])
                    offset += tile.nbytes
            assert left == 0, f"the pieces have {nbytes - left} bytes, {nbytes} were announced"

    def receive(
        self, into: Callable[[ReceivedT, int], Sequence[memoryview]] | None = None
    ) -> ReceivedT | None:
        """Receive one frame; None at an orderly end.

        Args:
            into: given the message and its payload's size in bytes, returns the buffers to fill in
                order; their sizes add up to it. They may be used only once this has returned.

        Raises:
            FrameRejected: the frame or its payload is not the one that the peer sent.
            MalformedMessage: the frame does not fit the protocol, or has a payload that was not
                asked for. After a message without payload the connection may be used on.
            ConnectionLost, PeerTimeout: the frame did not come whole.
        """
        head = self.receive_head()
        if head is None:
            return None
        message, payload_nbytes = head
        buffers = into(message, payload_nbytes) if into is not None and payload_nbytes else ()
        if sum(buffer.nbytes for buffer in buffers) != payload_nbytes:
            self.interrupt()
            raise MalformedMessage(
                f"{self.peer}: sent {payload_nbytes} bytes of payload that were not asked for"
            )
        for buffer in buffers:
            self.fill(buffer)
        return message

    def receive_head(self) -> tuple[ReceivedT, int] | None:
        """Receive a frame without its payload, whose size in bytes is returned with the message.

        The caller then takes the payload, all of it, with `fill`. None at an orderly end. Raises as
        `receive` does.
        """
        if self._opener.is_between_frames:
            self._drop_descriptors()
        head = None
        while head is None:
            is_first = self._opener.is_between_frames
            count = self._receive_some(self._opener.buffer(), is_first)
            if count == 0 and is_first:
                return None
            if count == 0:
                raise ConnectionLost(f"{self.peer}: the connection ended in the middle of a frame")
            try:
                head = self._opener.advance(count)
            except BaseException:
                self.interrupt()
                raise
        return self._open(head)

    def fill(self, buffer: memoryview) -> None:
        """Fill the buffer with bytes of the frame's payload.

        They are authenticated only when the call that takes the payload's last byte has returned:
        until then, any use of them must be reversible.

        Raises as `receive` does.
        """
        rest = buffer.cast("B")
        if rest.nbytes > self._opener.payload_left:
            raise ValueError(f"the payload has only {self._opener.payload_left} bytes left")
        if not rest.nbytes:
            return
        while rest.nbytes:
            count = self._receive_payload(rest[:_RECEIVE_NBYTES])
            self._opener.cover(rest[:count])
            rest = rest[count:]
        if not self._opener.payload_left:
            tag = memoryview(bytearray(self._opener.payload_tag_nbytes))
            filled = 0
            while filled < tag.nbytes:
                filled += self._receive_payload(tag[filled:])
            with self._ending_on_error():
                self._opener.open_payload(tag)

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the last frame; the caller closes it.

        A descriptor that is not taken is closed when the next frame is received.
        """
        if not self._descriptors:
            raise MalformedMessage(f"{self.peer}: a file descriptor was promised and did not come")
        return self._descriptors.pop()

    def limit(self, bytes_per_s: int) -> None:
        """Make the kernel send no faster than this over TCP from now on; 0 lifts the limit."""
        self._socket.limit(bytes_per_s)

    def interrupt(self) -> None:
        """End the connection from any thread: another thread's wait ends too."""
        self._socket.interrupt()

    def close(self) -> None:
        """End the connection and free its descriptors. No thread may be using it."""
        self._socket.close()
        self._drop_descriptors()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _frame(self, message: SentT, payload_nbytes: int, descriptor: int | None) -> Iterator[None]:
        self._send_head(message, payload_nbytes, descriptor)
        # An error in the middle leaves half a frame on the way: nothing may follow it.
        with self._ending_on_error():
            yield
            self._socket.send_all([self._sealer.seal_payload()])

    def _send_head(self, message: SentT, payload_nbytes: int, descriptor: int | None) -> None:
        if descriptor is not None and not self._socket.is_unix:
            raise ValueError(f"{self.peer}: only Unix sockets carry file descriptors")
        flags = FrameFlags.NONE if descriptor is None else FrameFlags.DESCRIPTOR
        head = self._sealer.seal_head(self._side.sends.encode(message), payload_nbytes, flags)
        # As above; most frames are no more than this, and a context manager would take as long.
        try:
            self._socket.send_all(head, descriptor)
        except BaseException:
            self.interrupt()
            raise

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.interrupt()
            raise

    def _receive_some(self, buffer: memoryview, is_first: bool) -> int:
        if not is_first:
            return self._socket.receive_into(buffer)
        try:
            if not self._socket.is_unix:
                return self._socket.receive_into(buffer)
            # A descriptor rides on a frame's first byte.
            count, descriptors = self._socket.receive_with_descriptors(buffer)
        except ConnectionLost:
            return 0  # A peer that is killed may reset the connection; between frames it has ended.
        self._descriptors += descriptors
        return count

    def _receive_payload(self, buffer: memoryview) -> int:
        count = self._socket.receive_into(buffer)
        if not count:
            raise ConnectionLost(f"{self.peer}: the connection ended in the middle of a payload")
        return count

    def _open(self, head: FrameHead) -> tuple[ReceivedT, int]:
        try:
            check_descriptor(head, self._descriptors, self.peer)
            return self._side.receives.decode(head.body, self.peer), head.payload_nbytes
        except MalformedMessage:
            if head.payload_nbytes:
                self.interrupt()  # The payload's meaning is unknown, so it is not taken.
            self._drop_descriptors()
            raise

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def check_descriptor(head: FrameHead, descriptors: Sequence[int], peer: str) -> None:
    """Raise MalformedMessage unless a descriptor came exactly if the frame announces one."""
    if head.has_descriptor and not descriptors:
        raise MalformedMessage(f"{peer}: a frame came without the file descriptor it announces")
    if descriptors and not head.has_descriptor:
        raise MalformedMessage(f"{peer}: a frame came with a file descriptor it does not announce")


def _tiles(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, _TILE_NBYTES):
        yield view[start : start + _TILE_NBYTES]
