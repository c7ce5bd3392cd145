"""The line between an agent and one of its workers: JSON messages over an inherited Unix socket pair.

A frame is a four-byte big-endian length and a JSON object; a file descriptor may ride on a frame. The pair is private to the two
processes, so it needs no authentication; its end of file is how either learns that the other is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from typing import Any

_HEADER = struct.Struct(">I")
_CHUNK_NBYTES = 65536

Message = dict[str, Any]


def _frame(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


class _Inbox:
    """Collects bytes and descriptors until whole frames are there."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._descriptors: list[int] = []

    def add(self, data: bytes, descriptors: list[int]) -> None:
        self._bytes += data
        self._descriptors += descriptors

    def take(self) -> tuple[Message, int | None] | None:
        if len(self._bytes) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        message = json.loads(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        descriptor = self._descriptors.pop(0) if message.pop("_descriptor", False) else None
        return message, descriptor

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


class WorkerChannel:
    """The worker's end, blocking. One thread receives; any thread sends (a frame is one `sendall` under the caller's lock)."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._inbox = _Inbox()

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError when the agent is gone."""
        self._socket.sendall(_frame(message))

    def receive(self) -> tuple[Message, int | None] | None:
        """Wait for the next message and the descriptor that came with it; None when the agent is gone."""
        while (found := self._inbox.take()) is None:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK_NBYTES, 4)
            if not data:
                return None
            self._inbox.add(data, list(descriptors))
        return found

    def close(self) -> None:
        """Close the line; a blocked `receive` in another thread ends."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The agent closed first: nothing is left to shut down.
        self._socket.close()
        self._inbox.close()


class AgentChannel:
    """The agent's end, on its event loop. Workers send no descriptors, so plain reads suffice."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._inbox = _Inbox()
        self._sending = asyncio.Lock()

    async def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send one message, with a descriptor if given (the caller keeps its own copy).

        Raises:
            OSError: the worker is gone.
        """
        if descriptor is not None:
            message = {**message, "_descriptor": True}
        frame = _frame(message)
        async with self._sending:
            if descriptor is not None:
                # The descriptor rides on the first byte; a pair this idle always has room for one.
                socket.send_fds(self._socket, [frame[:1]], [descriptor])
                frame = frame[1:]
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    async def receive(self) -> Message | None:
        """Wait for the next message; None when the worker is gone."""
        loop = asyncio.get_running_loop()
        while (found := self._inbox.take()) is None:
            try:
                data = await loop.sock_recv(self._socket, _CHUNK_NBYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._inbox.add(data, [])
        return found[0]

    def close(self) -> None:
        """Close the line."""
        self._socket.close()
