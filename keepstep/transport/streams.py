"""Carries typed messages and file descriptors over a connection for asyncio.

It has the same handshake and frames as `connection`, without payloads: agents exchange messages
only. `stream_handshake` makes authenticated connections; `StreamConnection.over_pair` wraps one end
of a socket pair that two processes inherited.

Any task may send; one task receives. A receive that is cancelled loses nothing; a send that is
cancelled in the middle of a frame ends the connection, for nothing may follow half a frame.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Generic, Self

from keepstep.transport.blocking_socket import receive_descriptors, send_descriptor, unsent
from keepstep.transport.connection import check_descriptor
from keepstep.transport.errors import (
    ConnectionLost,
    MalformedMessage,
    TransportError,
)
from keepstep.transport.frames import FrameFlags, FrameHead, FrameOpener, FrameSealer
from keepstep.transport.handshake import AuthenticatedPeer
from keepstep.transport.keys import NO_KEYS
from keepstep.transport.protocol import ReceivedT, SentT, Side


class StreamConnection(Generic[SentT, ReceivedT]):
    """One connection on the running event loop. `close` ends it.

    Attributes:
        peer: the other end's name in errors.
        peer_node: the job's node that the other end proved to be; "" over a socket pair.
        version: the protocol version that both ends speak.
    """

    def __init__(
        self,
        raw: socket.socket,
        side: Side[SentT, ReceivedT],
        peer: str,
        authenticated: AuthenticatedPeer | None,
    ) -> None:
        raw.setblocking(False)
        self._socket = raw
        self._is_unix = raw.family == socket.AF_UNIX
        self._side = side
        keys = NO_KEYS if authenticated is None else authenticated.keys
        self.peer = peer
        self.peer_node = "" if authenticated is None else authenticated.node
        self.version = side.versions.newest if authenticated is None else authenticated.version
        self._sealer = FrameSealer(keys.send, side.max_body_nbytes)
        self._opener = FrameOpener(keys.receive, side.max_body_nbytes, peer)
        self._sending = asyncio.Lock()
        self._descriptors: list[int] = []
        self._is_closed = False
        self._waiters: dict[Callable[..., Any], asyncio.Future[None]] = {}

    @classmethod
    def over_pair(cls, end: socket.socket, side: Side[SentT, ReceivedT], peer: str) -> Self:
        """Wrap one end of a socket pair that only this process and its peer have."""
        return cls(end, side, peer, None)

    async def send(self, message: SentT, descriptor: int | None = None) -> None:
        """Send one frame, with a descriptor riding on it if given (Unix sockets only).

        The caller keeps its own copy of the descriptor. It waits until the kernel has taken the
        frame: use `asyncio.timeout` where the peer may be stuck.

        Raises:
            ConnectionLost: the frame was not sent whole; the connection has ended.
            MessageTooLarge: nothing was sent.
        """
        if descriptor is not None and not self._is_unix:
            raise ValueError(f"{self.peer}: only Unix sockets carry file descriptors")
        flags = FrameFlags.NONE if descriptor is None else FrameFlags.DESCRIPTOR
        body = self._side.sends.encode(message)
        async with self._sending:
            head = self._sealer.seal_head(body, 0, flags)
            try:
                await self._send_all([memoryview(part) for part in head if part], descriptor)
            except OSError as error:
                self._end()
                raise ConnectionLost(f"{self.peer}: broke while sending: {error}") from error
            except BaseException:
                self._end()
                raise

    async def receive(self) -> ReceivedT | None:
        """Wait for the next message; None at an orderly end.

        Raises:
            FrameRejected: the frame is not the one that the peer sent.
            MalformedMessage: the frame does not fit the protocol. If it was complete, the
                connection can still be used.
            ConnectionLost: the connection ended in the middle of a frame.
        """
        if self._opener.is_between_frames:
            self._drop_descriptors()
        while True:
            is_first = self._opener.is_between_frames
            try:
                count = await self._receive_some(self._opener.buffer(), is_first)
            except OSError as error:
                if is_first:
                    return None  # A peer that is killed may reset the connection.
                raise ConnectionLost(f"{self.peer}: the connection broke: {error}") from error
            if not count and is_first:
                return None
            if not count:
                raise ConnectionLost(f"{self.peer}: the connection ended in the middle of a frame")
            try:
                head = self._opener.advance(count)
                if head is not None and head.payload_nbytes:
                    raise MalformedMessage(
                        f"{self.peer}: sent {head.payload_nbytes} bytes of payload that were not "
                        f"asked for"
                    )
            except TransportError:
                self._end()
                raise
            if head is not None:
                return self._open(head)

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the last message; the caller closes it.

        A descriptor that is not taken is closed when the next message is received.
        """
        if not self._descriptors:
            raise MalformedMessage(f"{self.peer}: a file descriptor was promised and did not come")
        return self._descriptors.pop()

    def close(self) -> None:
        """End the connection; tasks that wait on it get None or ConnectionLost."""
        if self._is_closed:
            return
        self._is_closed = True
        # Before the descriptor is closed: its number may be reused at once.
        for remove, waiter in list(self._waiters.items()):
            remove(self._socket)
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        self._socket.close()
        self._drop_descriptors()

    def _open(self, head: FrameHead) -> ReceivedT:
        try:
            check_descriptor(head, self._descriptors, self.peer)
            return self._side.receives.decode(head.body, self.peer)
        except MalformedMessage:
            self._drop_descriptors()
            raise

    async def _receive_some(self, buffer: memoryview, is_first: bool) -> int:
        loop = asyncio.get_running_loop()
        while not self._is_closed:
            try:
                if not (is_first and self._is_unix):
                    return self._socket.recv_into(buffer)
                # A descriptor rides on a frame's first byte.
                count, descriptors = receive_descriptors(self._socket, buffer)
                self._descriptors += descriptors
                return count
            except BlockingIOError:
                await self._wait(loop.add_reader, loop.remove_reader)
        return 0

    async def _send_all(self, views: list[memoryview], descriptor: int | None) -> None:
        loop = asyncio.get_running_loop()
        while views:
            if self._is_closed:
                raise BrokenPipeError("it was closed here")
            try:
                sent = send_descriptor(self._socket, views, descriptor)
                views, descriptor = unsent(views, sent), None
            except BlockingIOError:
                await self._wait(loop.add_writer, loop.remove_writer)

    async def _wait(self, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
        """Wait until the socket is ready, or closed here."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[remove] = waiter
        # By number: for an unregistered object the selector makes a text, with two system calls for
        # a socket.
        descriptor = self._socket.fileno()
        add(descriptor, _wake, waiter)
        try:
            await waiter
        finally:
            if self._waiters.pop(remove, None) is not None:
                remove(descriptor)

    def _end(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # It had ended already.

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
