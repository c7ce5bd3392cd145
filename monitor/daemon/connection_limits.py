"""Drops connections that do not prove soon that they may ask something.

aiohttp waits without a limit for a request to begin or to end. Who reaches the port could use up
the daemon's descriptors so, and the nodes' summaries would not get through.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from keepstep.transport.admission import MAX_PENDING, PendingConnections

PENDING_S = 10.0
"""How long a connection may last without an authorized request."""


class ConnectionLimits:
    """The connections without an authorized request so far: few, and none for long.

    Args:
        pending_s: seconds after which one is dropped.
        most_pending: number beyond which the oldest is dropped.
    """

    def __init__(self, pending_s: float = PENDING_S, most_pending: int = MAX_PENDING) -> None:
        self._pending_s = pending_s
        self._pending: PendingConnections[web.RequestHandler] = PendingConnections(most_pending)

    def accept(self, connection: web.RequestHandler) -> web.RequestHandler:
        """Note a connection that comes in, and return it."""
        dropped = self._pending.add(connection)
        if dropped is not None:
            _drop(dropped)
        asyncio.get_running_loop().call_later(self._pending_s, self._expire, connection)
        return connection

    def admit(self, request: web.Request) -> None:
        """Keep the connection of a request that was authorized."""
        self._pending.discard(request.protocol)

    def _expire(self, connection: web.RequestHandler) -> None:
        if self._pending.discard(connection):
            _drop(connection)


def _drop(connection: web.RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()
