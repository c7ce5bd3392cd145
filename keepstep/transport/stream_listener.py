"""Accepts connections for agents, on their event loop. See `listener` for the blocking equivalent.

Promises as there. A listener may be opened before the job's secret is known: it then sends clients
its node at once, so that they know whom they have reached, and completes their handshakes when
`admit` is called.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Generic

from keepstep.transport.addresses import listen, tcp_address_of
from keepstep.transport.admission import (
    EXHAUSTED_PAUSE_S,
    MAX_PENDING,
    PendingConnections,
    is_exhaustion,
)
from keepstep.transport.blocking_handshake import HANDSHAKE_S
from keepstep.transport.errors import PeerUnavailable, TransportError
from keepstep.transport.protocol import ClientT, Protocol, ServerT, check_secret
from keepstep.transport.stream_handshake import accept_stream
from keepstep.transport.streams import StreamConnection

log = logging.getLogger("keepstep")


class StreamListener(Generic[ClientT, ServerT]):
    """Serves one protocol at a TCP address. Created on a running loop; `close` ends it.

    Args:
        address: `tcp:HOST:PORT`; port 0 takes a free one.
        protocol: of the server.
        node: this node, which every client learns.
        serve: converses with one client until its connection ends; TransportErrors it lets through
            are taken for the client's end.
        max_pending: greatest number of connections that have not authenticated yet.
        handshake_s: limit for the handshake of each of them in total, the wait for `admit`
            included.

    Raises:
        OSError: the address is taken, or is not of this host.
    """

    def __init__(
        self,
        address: str,
        protocol: Protocol[ClientT, ServerT],
        node: str,
        serve: Callable[[StreamConnection[ServerT, ClientT]], Awaitable[None]],
        *,
        max_pending: int = MAX_PENDING,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._listening = listen(address)
        self._protocol = protocol
        self._node = node
        self._serve = serve
        self._handshake_s = handshake_s
        self._secret: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending: PendingConnections[asyncio.Task[None]] = PendingConnections(max_pending)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._is_exhausted = False

    @property
    def address(self) -> str:
        """The address at which it listens."""
        return tcp_address_of(self._listening)

    @property
    def pending(self) -> int:
        """Number of connections that have not authenticated yet."""
        return len(self._pending)

    def start(self) -> None:
        """Begin to accept."""
        self._accepting = asyncio.create_task(self._accept_all())

    def admit(self, secret: bytes) -> None:
        """Complete handshakes from now on with clients that know the secret."""
        check_secret(secret)
        self._secret.set_result(secret)

    async def close(self) -> None:
        """Refuse new connections, end all present ones, and wait for all tasks but the caller."""
        tasks: list[asyncio.Task[Any]] = [] if self._accepting is None else [self._accepting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()
        self._secret.cancel()
        conversations = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                raw, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                if is_exhaustion(error):
                    await self._pause(error)
                continue  # Otherwise the client was gone before it was accepted.
            if self._is_exhausted:
                self._is_exhausted = False
                log.warning("accepting %s connections again", self._protocol.name)
            self._begin(raw)

    def _begin(self, raw: socket.socket) -> None:
        task = asyncio.create_task(self._converse(raw))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._forget(task, raw))
        dropped = self._pending.add(task)
        if dropped is not None:
            dropped.cancel()

    async def _pause(self, error: OSError) -> None:
        if not self._is_exhausted:
            self._is_exhausted = True
            log.warning(
                "cannot accept %s connections now (%s); trying again until it is possible. "
                "Raise the limit on open files if this lasts",
                self._protocol.name,
                error,
            )
        oldest = self._pending.drop_oldest()
        if oldest is not None:
            oldest.cancel()
        await asyncio.sleep(EXHAUSTED_PAUSE_S)

    async def _converse(self, raw: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            connection = await accept_stream(
                raw, self._protocol, self._node, self._secret, handshake_s=self._handshake_s
            )
            self._pending.discard(task)
            try:
                await self._serve(connection)
            finally:
                connection.close()
        except PeerUnavailable as error:
            log.debug("a %s connection ended: %s", self._protocol.name, error)
        except TransportError as error:
            log.warning("refused a %s connection: %s", self._protocol.name, error)

    def _forget(self, task: asyncio.Task[None], raw: socket.socket) -> None:
        raw.close()  # A task that was cancelled before it began has not closed it.
        self._pending.discard(task)
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "serving a client of the %s protocol failed", self._protocol.name, exc_info=error
            )
