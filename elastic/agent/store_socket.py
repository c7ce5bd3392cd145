"""Reserves the port at which the next generation's torch store will be served."""

from __future__ import annotations

import socket

from keepstep.transport.addresses import bound_socket

_BACKLOG = 1024


class StoreSocket:
    """A listening socket on a free port of a host. `close` ends it.

    The port is announced in the node's record before anyone knows whether this node will serve the
    store; that it listens already lets peers connect before the store is there.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._listening = _listen(host)

    @property
    def port(self) -> int:
        """The port that is reserved now."""
        return int(self._listening.getsockname()[1])

    def take(self) -> socket.socket:
        """Return the socket, which the caller closes, and reserve another port."""
        taken, self._listening = self._listening, _listen(self._host)
        return taken

    def close(self) -> None:
        """Give up the port."""
        self._listening.close()


def _listen(host: str) -> socket.socket:
    listening = bound_socket(host, 0)
    listening.listen(_BACKLOG)
    return listening
