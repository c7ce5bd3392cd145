"""Accepts connections for blocking servers: one thread accepts, each connection has one of its own.

Promises:
- Accepting goes on until `close`, whatever happens: exhausted descriptors or memory pause it, and
  drop the oldest connection that has not authenticated.
- At most `max_pending` connections have not authenticated, each for `handshake_s` at most in total.
- `serve` is called with authenticated connections only, each in its own thread; the connection is
  closed when it returns.
- `close` returns when no thread and no connection is left. `serve` must return when its
  connection ends.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Generic

from keepstep.transport.admission import (
    EXHAUSTED_PAUSE_S,
    MAX_PENDING,
    PendingConnections,
    is_exhaustion,
)
from keepstep.transport.blocking_handshake import HANDSHAKE_S, accept
from keepstep.transport.connection import Connection
from keepstep.transport.errors import PeerUnavailable, TransportError
from keepstep.transport.protocol import ClientT, Identity, Protocol, ServerT

log = logging.getLogger("keepstep")


class Listener(Generic[ClientT, ServerT]):
    """Serves one protocol on listening sockets, which it owns. `start` begins, `close` ends it.

    Args:
        sockets: from `addresses.listen`.
        protocol: of the server.
        identity: of this side.
        serve: converses with one client until its connection ends; TransportErrors it lets through
            are taken for the client's end.
        max_pending: greatest number of connections that have not authenticated yet.
        handshake_s: limit for the handshake of each of them, in total.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        protocol: Protocol[ClientT, ServerT],
        identity: Identity,
        serve: Callable[[Connection[ServerT, ClientT]], None],
        *,
        max_pending: int = MAX_PENDING,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._sockets = sockets
        self._protocol = protocol
        self._identity = identity
        self._serve = serve
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._pending: PendingConnections[socket.socket] = PendingConnections(max_pending)
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._is_exhausted = False
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept_all, name="keepstep accepts")

    @property
    def pending(self) -> int:
        """Number of connections that have not authenticated yet."""
        with self._lock:
            return len(self._pending)

    def start(self) -> None:
        """Begin to accept."""
        self._accepting.start()

    def close(self) -> None:
        """Refuse new connections, end all present ones, and wait for all threads but the caller."""
        self._closing.set()
        self._wake_sender.close()
        if self._accepting.ident is not None:
            self._accepting.join()
        for listening in self._sockets:
            listening.close()
        self._wake_receiver.close()
        with self._lock:
            connections = dict(self._connections)
        for raw, thread in connections.items():
            _shut_down(raw)
            if thread is not threading.current_thread():
                thread.join()

    def _accept_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listening in (*self._sockets, self._wake_receiver):
                selector.register(listening, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, _ in selector.select():
                    if isinstance(key.fileobj, socket.socket) and not self._closing.is_set():
                        self._accept_one(key.fileobj)

    def _accept_one(self, listening: socket.socket) -> None:
        try:
            raw, _ = listening.accept()
        except OSError as error:
            if is_exhaustion(error):
                self._pause(error)
            return  # Otherwise the client was gone before it was accepted.
        if self._is_exhausted:
            self._is_exhausted = False
            log.warning("accepting %s connections again", self._protocol.name)
        thread = threading.Thread(
            target=self._converse, args=(raw,), name=f"keepstep serves {self._protocol.name}"
        )
        with self._lock:
            dropped = self._pending.add(raw)
            self._connections[raw] = thread
        if dropped is not None:
            _shut_down(dropped)
        try:
            thread.start()
        except RuntimeError as error:  # The process may not have another thread now.
            self._forget(raw)
            raw.close()
            self._pause(error)

    def _pause(self, error: Exception) -> None:
        if not self._is_exhausted:
            self._is_exhausted = True
            log.warning(
                "cannot accept %s connections now (%s); trying again until it is possible. "
                "Raise the limits on open files and threads if this lasts",
                self._protocol.name,
                error,
            )
        with self._lock:
            oldest = self._pending.drop_oldest()
        if oldest is not None:
            _shut_down(oldest)
        self._closing.wait(EXHAUSTED_PAUSE_S)

    def _converse(self, raw: socket.socket) -> None:
        try:
            connection = accept(raw, self._protocol, self._identity, handshake_s=self._handshake_s)
            with connection:
                with self._lock:
                    self._pending.discard(raw)
                self._serve(connection)
        except PeerUnavailable as error:
            log.debug("a %s connection ended: %s", self._protocol.name, error)
        except TransportError as error:
            log.warning("refused a %s connection: %s", self._protocol.name, error)
        finally:
            raw.close()
            self._forget(raw)

    def _forget(self, raw: socket.socket) -> None:
        with self._lock:
            self._pending.discard(raw)
            self._connections.pop(raw, None)


def _shut_down(raw: socket.socket) -> None:
    """End a connection that another thread owns, and may wait for."""
    try:
        raw.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # It had ended already.
