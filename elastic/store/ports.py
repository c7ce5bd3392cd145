"""Ports that are spoken for before anybody listens on them.

A port that was merely free a moment ago may be anybody's by the time a process listens on it: the kernel gives it to the
next connection that leaves this machine. A socket that is bound, never listens and allows reuse keeps the kernel from
giving it away, and lets a listener that allows reuse too (as etcd, torch's TCPStore and Python's servers do) have it
(Linux, `inet_csk_get_port`).
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class ReservedPort:
    """One TCP port, kept for a listener of ours until closed; a context manager.

    Args:
        host: the address that will be listened on.
        port: the port wanted; 0 for any that is free.

    Raises:
        OSError: somebody listens on the port wanted.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back; who listens on it goes on. Safe to call twice."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
