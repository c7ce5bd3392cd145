"""Reserves TCP ports for processes that will listen on them later.

A port that was only found free may be taken before a process listens on it: the kernel may give it
to the next outgoing connection of this machine. A socket that is bound, never listens and allows
reuse keeps the kernel from doing so. A listener that allows reuse too (etcd, torch's TCPStore and
Python's servers do) can still bind the port (Linux, `inet_csk_get_port`).
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class ReservedPort:
    """One reserved TCP port, until closed; a context manager.

    Args:
        host: address that the later process will listen on.
        port: port to reserve; 0: any free port.

    Raises:
        OSError: a process already listens on the port.
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
        """End the reservation; a listener on the port is not affected. May be called twice."""
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
