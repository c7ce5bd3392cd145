"""Makes authenticated blocking connections: connects or accepts, and runs the handshake.

Promise: a connection that is returned is authenticated both ways, after `handshake_s` in total at
most, however slowly the peer's bytes trickle in; on any error the socket is closed.
"""

from __future__ import annotations

import secrets
import socket
import time

from keepstep.transport.addresses import LOST_S, open_socket, peer_name, prepare
from keepstep.transport.blocking_socket import BlockingSocket
from keepstep.transport.connection import Connection
from keepstep.transport.errors import ConnectionLost, TransportError
from keepstep.transport.handshake import NONCE_NBYTES, AuthenticatedPeer, Handshake
from keepstep.transport.protocol import (
    ClientT,
    Identity,
    Protocol,
    ReceivedT,
    SentT,
    ServerT,
    Side,
)

HANDSHAKE_S = 10.0
IDLE_S = 30.0


def connect(
    address: str,
    protocol: Protocol[ClientT, ServerT],
    identity: Identity,
    *,
    handshake_s: float = HANDSHAKE_S,
    idle_s: float | None = IDLE_S,
) -> Connection[ClientT, ServerT]:
    """Connect to a server and authenticate both ways.

    The answering node is `peer_node` of the result: compare it if a certain node is meant.

    Args:
        address: `unix:PATH` or `tcp:HOST:PORT`.
        protocol: the protocol of the server.
        identity: of this side.
        handshake_s: limit for connecting and authenticating in total.
        idle_s: limit for sending and receiving from then on while not a byte moves.

    Raises:
        PeerRefused: no process listens there.
        PeerUnavailable: nobody answers there in time, or the connection breaks.
        AuthenticationFailed: the peer does not know the secret.
        VersionMismatch: the peer speaks other versions only.
        MalformedMessage: the peer speaks another protocol.
    """
    deadline_s = time.monotonic() + handshake_s
    raw = open_socket(address, deadline_s)
    return _authenticate(raw, address, protocol.client, identity, deadline_s, idle_s)


def accept(
    raw: socket.socket,
    protocol: Protocol[ClientT, ServerT],
    identity: Identity,
    *,
    handshake_s: float = HANDSHAKE_S,
    stuck_s: float = LOST_S,
) -> Connection[ServerT, ClientT]:
    """Authenticate a connection that came in, which this owns from now on, both ways.

    There is no limit for the next request.

    Args:
        raw: the connection.
        protocol: the protocol of this server.
        identity: of this side.
        handshake_s: limit for authenticating in total.
        stuck_s: limit for sending from then on while the peer takes not a byte: unsent data stay in
            memory. A peer that reads from several takes each in turn, for seconds.

    Raises as `connect` does.
    """
    deadline_s = time.monotonic() + handshake_s
    try:
        prepare(raw)
        address = peer_name(raw)
    except OSError as error:
        raw.close()
        raise ConnectionLost(f"a connection broke before it was accepted: {error}") from error
    connection = _authenticate(raw, address, protocol.server, identity, deadline_s, None)
    connection.set_sending_limit(stuck_s)
    return connection


def _authenticate(
    raw: socket.socket,
    address: str,
    side: Side[SentT, ReceivedT],
    identity: Identity,
    deadline_s: float,
    idle_s: float | None,
) -> Connection[SentT, ReceivedT]:
    endpoint = BlockingSocket(raw, address)
    try:
        endpoint.sending.deadline_s = endpoint.receiving.deadline_s = deadline_s
        nonce = secrets.token_bytes(NONCE_NBYTES)
        handshake = Handshake(side, identity.node, identity.secret, nonce, address)
        authenticated = _run(handshake, endpoint)
    except BaseException:
        endpoint.close()
        raise
    endpoint.peer = f"node {authenticated.node} at {address}"
    connection = Connection(endpoint, side, authenticated)
    connection.set_deadline(None)
    connection.set_idle_limit(idle_s)
    return connection


def _run(handshake: Handshake, endpoint: BlockingSocket) -> AuthenticatedPeer:
    endpoint.send_all([handshake.start()])
    while (authenticated := handshake.result) is None:
        data = memoryview(bytearray(handshake.wanted_nbytes))
        filled = 0
        while filled < data.nbytes:
            count = endpoint.receive_into(data[filled:])
            if not count:
                raise ended_in_handshake(endpoint.peer)
            filled += count
        answer = handshake.receive(bytes(data))
        try:
            endpoint.send_all([answer])
        except TransportError:
            if handshake.refusal is None:
                raise
        if handshake.refusal is not None:
            raise handshake.refusal
    return authenticated


def ended_in_handshake(peer: str) -> ConnectionLost:
    """Return the error for a connection that ends before both ends are authenticated."""
    return ConnectionLost(
        f"{peer}: ended the connection during the handshake; "
        f"does it have another secret or another version of keepstep?"
    )
