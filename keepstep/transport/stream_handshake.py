"""Makes authenticated connections for asyncio: connects or accepts, and runs the handshake.

Promise: a connection that is returned is authenticated both ways, after `handshake_s` in total at
most, however slowly the peer's bytes trickle in; on any error the socket is closed.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

from keepstep.transport.addresses import (
    UnixAddress,
    parse_address,
    peer_name,
    prepare,
    socket_name,
    unreachable,
)
from keepstep.transport.blocking_handshake import HANDSHAKE_S, ended_in_handshake
from keepstep.transport.errors import ConnectionLost, PeerTimeout, PeerUnavailable, VersionMismatch
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
from keepstep.transport.streams import StreamConnection


async def open_stream(
    address: str,
    protocol: Protocol[ClientT, ServerT],
    identity: Identity,
    *,
    handshake_s: float = HANDSHAKE_S,
) -> StreamConnection[ClientT, ServerT]:
    """Connect to `tcp:HOST:PORT` or `unix:PATH`, and authenticate both ways.

    The answering node is `peer_node` of the result: another name than expected means that another
    agent has taken the port. Errors of the handshake have `peer_node` too, as a claim.

    Args:
        address: of the server.
        protocol: the protocol of the server.
        identity: of this side.
        handshake_s: limit for connecting and authenticating in total.

    Raises:
        PeerRefused: no process listens there.
        PeerUnavailable: nobody answers there in time, or the connection breaks.
        AuthenticationFailed: the peer does not know the secret.
        VersionMismatch: the peer speaks other versions only.
        MalformedMessage: the peer speaks another protocol.
    """
    nonce = secrets.token_bytes(NONCE_NBYTES)
    handshake = Handshake(protocol.client, identity.node, identity.secret, nonce, address)
    raw = await _greet(address, handshake, handshake_s)
    try:
        assert handshake.result is not None
        return _connection(raw, protocol.client, address, handshake.result)
    except BaseException:
        raw.close()
        raise


async def identify(
    address: str, protocol: Protocol[ClientT, ServerT], node: str, *, timeout_s: float
) -> str:
    """Return the node that the server at an address claims to be; nothing is authenticated.

    For a probe that only asks whether a certain agent still answers at its port.

    Raises as `open_stream` does; never for a secret or versions that differ.
    """
    nonce = secrets.token_bytes(NONCE_NBYTES)
    handshake = Handshake(protocol.client, node, None, nonce, address)
    try:
        (await _greet(address, handshake, timeout_s)).close()
    except VersionMismatch as error:
        return error.peer_node
    assert handshake.peer_hello is not None
    return handshake.peer_hello.node


async def accept_stream(
    raw: socket.socket,
    protocol: Protocol[ClientT, ServerT],
    node: str,
    secret: asyncio.Future[bytes],
    *,
    handshake_s: float = HANDSHAKE_S,
) -> StreamConnection[ServerT, ClientT]:
    """Authenticate a connection that came in, which this owns from now on, both ways.

    Args:
        raw: the connection.
        protocol: the protocol of this server.
        node: this node, which the client learns at once.
        secret: the job's secret, which may become known only while clients wait for it.
        handshake_s: limit for all of this.

    Raises as `open_stream` does.
    """
    address = "a client"
    try:
        prepare(raw)
        address = peer_name(raw)
        nonce = secrets.token_bytes(NONCE_NBYTES)
        known_secret = secret.result() if secret.done() else None
        handshake = Handshake(protocol.server, node, known_secret, nonce, address)
        async with asyncio.timeout(handshake_s):
            await _exchange(raw, handshake, address, secret)
        assert handshake.result is not None
        return _connection(raw, protocol.server, address, handshake.result)
    except BaseException as error:
        raw.close()
        if isinstance(error, OSError):
            raise _broken(address, error) from error
        raise


async def _greet(address: str, handshake: Handshake, timeout_s: float) -> socket.socket:
    """Connect, and run the client's handshake."""
    raw: socket.socket | None = None
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _connect(address)
            await _exchange(raw, handshake, address, None)
    except BaseException as error:
        if raw is not None:
            raw.close()
        if isinstance(error, OSError):
            raise (
                unreachable(address, error) if raw is None else _broken(address, error)
            ) from error
        raise
    return raw


async def _connect(address: str) -> socket.socket:
    place = parse_address(address)
    loop = asyncio.get_running_loop()
    if isinstance(place, UnixAddress):
        raw = socket.socket(socket.AF_UNIX)
        try:
            prepare(raw)
            with socket_name(place.path) as name:
                await loop.sock_connect(raw, name)
        except BaseException:
            raw.close()
            raise
        return raw
    candidates = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    last_error = OSError(f"{place.host} has no address")
    for family, kind, number, _, target in candidates:
        raw = socket.socket(family, kind, number)
        try:
            prepare(raw)
            await loop.sock_connect(raw, target)
        except OSError as error:
            raw.close()
            last_error = error
        except BaseException:
            raw.close()
            raise
        else:
            return raw
    raise last_error


async def _exchange(
    raw: socket.socket, handshake: Handshake, peer: str, secret: asyncio.Future[bytes] | None
) -> None:
    """Run a handshake until it is complete, or waits for a secret that never comes."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(raw, handshake.start())
    while handshake.wanted_nbytes:
        data = memoryview(bytearray(handshake.wanted_nbytes))
        filled = 0
        while filled < data.nbytes:
            count = await loop.sock_recv_into(raw, data[filled:])
            if not count:
                raise ended_in_handshake(peer)
            filled += count
        answer = handshake.receive(bytes(data))
        try:
            await loop.sock_sendall(raw, answer)
        except OSError:
            if handshake.refusal is None:
                raise
        if handshake.refusal is not None:
            raise handshake.refusal
        if handshake.needs_secret and secret is not None:
            # The future's owner may wait for it elsewhere too: it is not cancelled from here.
            answer = handshake.provide_secret(await asyncio.shield(secret))
            await loop.sock_sendall(raw, answer)


def _connection(
    raw: socket.socket, side: Side[SentT, ReceivedT], address: str, peer: AuthenticatedPeer
) -> StreamConnection[SentT, ReceivedT]:
    return StreamConnection(raw, side, f"node {peer.node} at {address}", peer)


def _broken(address: str, error: OSError) -> PeerUnavailable:
    if isinstance(error, TimeoutError):
        return PeerTimeout(f"{address}: did not complete the handshake in time")
    return ConnectionLost(f"{address}: the connection broke in the handshake: {error}")
