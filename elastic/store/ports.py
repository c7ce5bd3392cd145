"""Reserves TCP ports for processes that will listen on them later.

A port that was only found free may be taken before a process listens on it: the kernel may give it
to the next outgoing connection of this machine. A socket that is bound, never listens and allows
reuse keeps the kernel from doing so. A listener that allows reuse too (etcd, torch's TCPStore and
Python's servers do) can still bind the port (Linux, `inet_csk_get_port`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from keepstep.transport.addresses import bound_socket


class ReservedPort:
    """One reserved TCP port, until closed; a context manager.

    Args:
        host: address or name that the later process will listen on.
        port: port to reserve; 0: any free port.

    Attributes:
        address: the address of `host` on which it is.
        number: the port.

    Raises:
        OSError: a process already listens on the port.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = bound_socket(host, port, reuse=True)
        self.address: str = self._socket.getsockname()[0]
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
