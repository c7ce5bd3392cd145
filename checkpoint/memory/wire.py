"""Framed messages between snapshot servers and those who use them, over authenticated Unix and TCP sockets.

A frame is a fixed header (magic, JSON length, payload length), a JSON object, and payload bytes that are received straight into the memory
they are meant for. Both ends prove that they know the job's secret by HMAC-SHA256 over the other's nonce before anything else is read.
The traffic itself is not encrypted: it belongs on the cluster's own network, like the training traffic beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from keepstep.checkpoint.errors import SnapshotUnavailable

_HEADER = struct.Struct(">4sIQ")
_SO_MAX_PACING_RATE = 47
_UNLIMITED = 2**64 - 1
_MAGIC = b"KSP1"
_NONCE_NBYTES = 32
_MAX_JSON_NBYTES = 256 * 2**20
_HANDSHAKE_S = 10.0

Message = dict[str, Any]


@contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """Name a Unix socket however long its path is.

    The kernel takes 107 bytes of a name (unix(7)), and clusters' scratch directories alone may be longer; through its
    directory's descriptor the name is short. It holds while the context lasts.

    Raises:
        OSError: there is no such directory.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class Connection:
    """One authenticated connection, for one thread at a time. `close` ends it."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket = connection
        self._is_unix = connection.family == socket.AF_UNIX
        self.peer = peer
        self._descriptors: list[int] = []

    @classmethod
    def connect(cls, address: str, secret: bytes, timeout_s: float) -> Self:
        """Connect to `unix:PATH` or `tcp:HOST:PORT` and authenticate both ways.

        Raises:
            SnapshotUnavailable: nobody answers there, or the secret differs.
        """
        scheme, _, rest = address.partition(":")
        try:
            if scheme == "unix":
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(timeout_s)
                with socket_name(Path(rest)) as name:
                    connection.connect(name)
            else:
                host, _, port = rest.rpartition(":")
                connection = socket.create_connection((host, int(port)), timeout=timeout_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise SnapshotUnavailable(f"no snapshot server at {address}: {error}") from error
        wire = cls(connection, address)
        try:
            wire._authenticate(secret, b"client", b"server")
            connection.settimeout(timeout_s)
        except BaseException:
            wire.close()
            raise
        return wire

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes, peer: str) -> Self:
        """Authenticate a connection that came in.

        Raises:
            SnapshotUnavailable: the other end does not know the secret.
        """
        wire = cls(connection, peer)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire._authenticate(secret, b"server", b"client")
        connection.settimeout(None)
        return wire

    def send(
        self, message: Message, payload: Sequence[memoryview] = (), descriptor: int | None = None
    ) -> None:
        """Send one frame, with a descriptor riding on it if given (Unix sockets only)."""
        nbytes = sum(part.nbytes for part in payload)
        head = _frame(message, nbytes)
        try:
            if descriptor is not None:
                sent = socket.send_fds(self._socket, [head], [descriptor])
                head = head[sent:]
            self._socket.sendall(head)
            for part in payload:
                self._socket.sendall(part)
        except OSError as error:
            raise SnapshotUnavailable(
                f"{self.peer}: the connection broke while sending: {error}"
            ) from error

    def send_files(self, message: Message, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Send one frame whose payload is byte ranges (descriptor, offset, count) of files, copied by the kernel."""
        try:
            self._socket.sendall(_frame(message, sum(count for _, _, count in ranges)))
            for descriptor, offset, count in ranges:
                while count:
                    sent = os.sendfile(self._socket.fileno(), descriptor, offset, count)
                    if sent == 0:
                        raise OSError("the snapshot's memory is shorter than its index says")
                    offset, count = offset + sent, count - sent
        except OSError as error:
            raise SnapshotUnavailable(
                f"{self.peer}: the connection broke while sending: {error}"
            ) from error

    def receive(
        self, into: Callable[[Message, int], Sequence[memoryview]] | None = None
    ) -> Message | None:
        """Receive one frame; None at an orderly end.

        Args:
            into: given the message and its payload's size, returns the buffers to fill in order; their sizes must add up to it.

        Raises:
            SnapshotUnavailable: the connection broke or timed out, or what came is no frame.
        """
        head = self.receive_head()
        if head is None:
            return None
        message, payload_nbytes = head
        buffers = into(message, payload_nbytes) if into is not None and payload_nbytes else ()
        if sum(buffer.nbytes for buffer in buffers) != payload_nbytes:
            raise SnapshotUnavailable(
                f"{self.peer}: sent {payload_nbytes} bytes that were not asked for"
            )
        for buffer in buffers:
            self.receive_into(buffer)
        return message

    def receive_head(self) -> tuple[Message, int] | None:
        """Receive a frame but for its payload, whose size is returned with the message; None at an orderly end.

        The caller takes the payload with `receive_into`, all of it. Raises as `receive` does.
        """
        header = bytearray(_HEADER.size)
        if not self.receive_into(memoryview(header), may_end=True):
            return None
        magic, json_nbytes, payload_nbytes = _HEADER.unpack(header)
        if magic != _MAGIC or json_nbytes > _MAX_JSON_NBYTES:
            raise SnapshotUnavailable(f"{self.peer}: what came is not of keepstep's protocol")
        body = bytearray(json_nbytes)
        self.receive_into(memoryview(body))
        message: Message = json.loads(body)
        return message, payload_nbytes

    def receive_into(self, buffer: memoryview, *, may_end: bool = False) -> bool:
        """Receive as many bytes as the buffer has; False if the connection ended before the first and that `may_end`."""
        filled = 0
        try:
            while filled < buffer.nbytes:
                if self._is_unix and may_end and not filled:
                    # A descriptor rides on a frame's first bytes.
                    data, descriptors, _, _ = socket.recv_fds(self._socket, buffer.nbytes, 1)
                    self._descriptors += descriptors
                    buffer[: len(data)] = data
                    count = len(data)
                else:
                    count = self._socket.recv_into(buffer[filled:])
                if count == 0:
                    if may_end and not filled:
                        return False
                    raise SnapshotUnavailable(
                        f"{self.peer}: the connection ended in the middle of a message"
                    )
                filled += count
        except TimeoutError as error:
            raise SnapshotUnavailable(f"{self.peer}: no answer in time") from error
        except ConnectionError as error:
            if may_end and not filled:
                return False
            raise SnapshotUnavailable(f"{self.peer}: the connection broke: {error}") from error
        except OSError as error:
            raise SnapshotUnavailable(f"{self.peer}: {error}") from error
        return True

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the last frame; the caller closes it."""
        if not self._descriptors:
            raise SnapshotUnavailable(
                f"{self.peer}: a file descriptor was promised and did not come"
            )
        return self._descriptors.pop(0)

    def limit(self, bytes_per_s: int) -> None:
        """Have the kernel send no faster than this from now on; 0 lifts the limit."""
        if not self._is_unix:
            rate = struct.pack("=Q", bytes_per_s or _UNLIMITED)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)

    def interrupt(self) -> None:
        """Make a receive that blocks in another thread end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The other end closed first.

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _authenticate(self, secret: bytes, us: bytes, them: bytes) -> None:
        """Exchange nonces, then proofs. The roles are part of what is proved, so a proof cannot be reflected."""
        self._socket.settimeout(_HANDSHAKE_S)
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        theirs = bytearray(_NONCE_NBYTES)
        proof = bytearray(hashlib.sha256().digest_size)
        try:
            self._socket.sendall(nonce)
            self.receive_into(memoryview(theirs))
            self._socket.sendall(_prove(secret, us, bytes(theirs)))
            self.receive_into(memoryview(proof))
        except OSError as error:
            raise SnapshotUnavailable(f"{self.peer}: no handshake: {error}") from error
        if not hmac.compare_digest(proof, _prove(secret, them, nonce)):
            raise SnapshotUnavailable(
                f"{self.peer}: does not know this job's secret; is it another job's server?"
            )


def encode(message: Message) -> bytes:
    """Return a frame without payload, for ends that speak asyncio."""
    return _frame(message, 0)


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """Read one frame without payload; None at the end of the connection."""
    try:
        magic, json_nbytes, _ = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        if magic != _MAGIC or json_nbytes > _MAX_JSON_NBYTES:
            raise SnapshotUnavailable("what came is not of keepstep's protocol")
        message: Message = json.loads(await reader.readexactly(json_nbytes))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


def _prove(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + nonce, hashlib.sha256).digest()


def _frame(message: Message, payload_nbytes: int) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(_MAGIC, len(body), payload_nbytes) + body
