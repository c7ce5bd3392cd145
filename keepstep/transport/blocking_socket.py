"""Sends and receives bytes on one connected socket, with deadlines, for blocking callers.

The socket itself is non-blocking; calls that must wait poll. So each direction has its own limits,
and one thread may send while another one receives.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.transport.codec import Buffer
from keepstep.transport.errors import ConnectionLost, PeerTimeout

_SO_MAX_PACING_RATE = 47  # include/uapi/asm-generic/socket.h; Python does not name it.
_UNLIMITED = 2**64 - 1
_DESCRIPTOR_SPACE_NBYTES = socket.CMSG_SPACE(struct.calcsize("i"))


@dataclass(slots=True)
class WaitLimits:
    """The limits of one direction's waits for the peer.

    Args:
        idle_s: the longest wait in which not a byte moves; None waits forever.
        deadline_s: the instant of `time.monotonic` after which nothing waits; None is none.
    """

    idle_s: float | None = None
    deadline_s: float | None = None

    def next_wait_ms(self, now_s: float) -> int | None:
        """Return how long to wait now at most, in milliseconds rounded up; None: forever."""
        limits = [] if self.idle_s is None else [self.idle_s]
        if self.deadline_s is not None:
            limits.append(max(self.deadline_s - now_s, 0.0))
        return -int(-1000 * min(limits) // 1) if limits else None

    def has_passed(self, now_s: float) -> bool:
        """Whether the deadline is over."""
        return self.deadline_s is not None and now_s >= self.deadline_s


class BlockingSocket:
    """One connected socket, each direction for one thread at a time. Owns it: `close` closes it.

    Every operation raises PeerTimeout when a limit is reached and ConnectionLost when the
    connection breaks. `interrupt` may be called from any thread.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.is_unix = connection.family == socket.AF_UNIX
        self.peer = peer
        self.sending = WaitLimits()
        self.receiving = WaitLimits()
        self._is_readable, self._is_writable = select.poll(), select.poll()
        self._is_readable.register(connection, select.POLLIN)
        self._is_writable.register(connection, select.POLLOUT)

    def receive_into(self, buffer: memoryview) -> int:
        """Receive at least one byte; return how many came, 0 at the connection's end."""
        while True:
            self._check(self.receiving)
            try:
                return self._socket.recv_into(buffer)
            except BlockingIOError:
                self._wait(self._is_readable, self.receiving)
            except OSError as error:
                raise ConnectionLost(f"{self.peer}: the connection broke: {error}") from error

    def receive_with_descriptors(self, buffer: memoryview) -> tuple[int, list[int]]:
        """Receive as `receive_into` does, and the descriptors that ride on these bytes.

        These are a frame's first bytes, which nearly always have to be waited for: it looks once
        they came.
        """
        while True:
            self._check(self.receiving)
            self._wait(self._is_readable, self.receiving)
            try:
                return receive_descriptors(self._socket, buffer)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost(f"{self.peer}: the connection broke: {error}") from error

    def send_all(self, parts: Sequence[Buffer], descriptor: int | None = None) -> None:
        """Send the parts, in order; the descriptor, if there is one, rides on the first byte."""
        views = [view for part in parts if (view := memoryview(part)).nbytes]
        while views:
            self._check(self.sending)
            try:
                sent = send_descriptor(self._socket, views, descriptor)
            except BlockingIOError:
                self._wait(self._is_writable, self.sending)
                continue
            except OSError as error:
                raise ConnectionLost(f"{self.peer}: broke while sending: {error}") from error
            descriptor = None
            views = unsent(views, sent)

    def send_file(self, descriptor: int, offset: int, count: int) -> None:
        """Send a byte range of a file, copied by the kernel (sendfile(2))."""
        while count:
            self._check(self.sending)
            try:
                sent = os.sendfile(self._socket.fileno(), descriptor, offset, count)
            except BlockingIOError:
                self._wait(self._is_writable, self.sending)
                continue
            except OSError as error:
                raise ConnectionLost(f"{self.peer}: broke while sending: {error}") from error
            if not sent:
                raise ConnectionLost(f"{self.peer}: the file to send ends before byte {offset}")
            offset, count = offset + sent, count - sent

    def limit(self, bytes_per_s: int) -> None:
        """Make the kernel send no faster than this over TCP from now on; 0 lifts the limit."""
        if not self.is_unix:
            rate = struct.pack("=Q", bytes_per_s or _UNLIMITED)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)

    def interrupt(self) -> None:
        """End the connection; a wait on it in another thread ends too."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The other end closed first, or `close` was called.

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _check(self, limits: WaitLimits) -> None:
        # Bytes that trickle in never make it wait long, so the deadline is looked at every time.
        if limits.has_passed(time.monotonic()):
            raise PeerTimeout(f"{self.peer}: did not finish in time")

    def _wait(self, poll: select.poll, limits: WaitLimits) -> None:
        if self._socket.fileno() < 0:
            # The number that it polls may be another socket's by now.
            raise ConnectionLost(f"{self.peer}: the connection was closed here")
        if not poll.poll(limits.next_wait_ms(time.monotonic())):
            raise PeerTimeout(f"{self.peer}: no answer in time; is its host alive?")


def receive_descriptors(connection: socket.socket, buffer: memoryview) -> tuple[int, list[int]]:
    """Receive bytes once, and the descriptors riding on them, closed on exec. Raises OSError."""
    nbytes, ancillary, _, _ = connection.recvmsg_into(
        [buffer], _DESCRIPTOR_SPACE_NBYTES, socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return nbytes, list(descriptors)


def send_descriptor(
    connection: socket.socket, parts: Sequence[memoryview], descriptor: int | None
) -> int:
    """Send once, with a descriptor riding on the bytes if given; return how many went.

    Raises:
        OSError: the connection broke, or (BlockingIOError) has no room now.
    """
    if descriptor is None:
        return connection.sendmsg(parts)
    rights = array.array("i", [descriptor])
    return connection.sendmsg(parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def unsent(parts: Sequence[memoryview], sent: int) -> list[memoryview]:
    """Return the rest of parts whose first bytes were sent."""
    left = []
    for part in parts:
        skipped = min(sent, part.nbytes)
        sent -= skipped
        if skipped < part.nbytes:
            left.append(part[skipped:])
    return left
