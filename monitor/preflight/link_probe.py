"""Measures the link between two doctors: latency, clock offset, and bandwidth both ways.

Blocking sockets, for what is measured is what the threads of a training job would get. The client
measures; the server only answers. The rates are those of one TCP connection: they include computing
and checking the tags by which the transport authenticates payloads, which takes a small part of the
time that the kernel takes for the same bytes.
"""

from __future__ import annotations

import time
from typing import TypeVar

from keepstep.monitor.preflight.examination import LinkResult
from keepstep.monitor.preflight.messages import (
    Ping,
    Pong,
    Reply,
    Request,
    Transfer,
    TransferReceived,
)
from keepstep.transport import Connection, ConnectionLost, MalformedMessage, Message

_CHUNK_NBYTES = 2**20
_CHUNKS = 64
_CHUNK = bytes(_CHUNK_NBYTES)
PINGS = 100
TRANSFER_NBYTES = _CHUNKS * _CHUNK_NBYTES

SentT = TypeVar("SentT", bound=Message)
ReceivedT = TypeVar("ReceivedT", bound=Message)
ExpectedT = TypeVar("ExpectedT", bound=Message)


def measure_link(connection: Connection[Request, Reply]) -> LinkResult:
    """Measure the link to a server that runs `answer_link_probe` meanwhile.

    Raises:
        TransportError: the link broke, was too slow for the connection's limits, or what came does
            not belong to a measurement.
    """
    pings = [_ping(connection) for _ in range(PINGS)]
    began_s = time.perf_counter()
    connection.send(Transfer(), [_CHUNK] * _CHUNKS)
    expect(connection, TransferReceived)
    sent_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    _receive_transfer(connection)
    received_s = time.perf_counter() - began_s
    quickest_s, offset_s = min(pings)
    return LinkResult(
        latency_s=sorted(pings)[PINGS // 2][0],
        send_rate=TRANSFER_NBYTES / sent_s,
        receive_rate=TRANSFER_NBYTES / received_s,
        clock_offset_s=offset_s,
        clock_error_s=quickest_s / 2,
    )


def answer_link_probe(connection: Connection[Reply, Request]) -> None:
    """Do the server's part of `measure_link`. Raises as it does."""
    for _ in range(PINGS):
        expect(connection, Ping)
        connection.send(Pong(at_s=time.time()))
    _receive_transfer(connection)
    connection.send(TransferReceived())
    connection.send(Transfer(), [_CHUNK] * _CHUNKS)


def expect(connection: Connection[SentT, ReceivedT], kind: type[ExpectedT]) -> ExpectedT:
    """Return the next message, which must be of this kind.

    Raises:
        ConnectionLost: the connection ended instead.
        MalformedMessage: another message came.
        TransportError: none came.
    """
    return _checked(connection.receive(), kind, connection.peer)


def _ping(connection: Connection[Request, Reply]) -> tuple[float, float]:
    """Return a message's seconds there and back, and the other clock minus this one.

    As if both ways took equally long.
    """
    wall_s, began_s = time.time(), time.perf_counter()
    connection.send(Ping())
    pong = expect(connection, Pong)
    took_s = time.perf_counter() - began_s
    return took_s, pong.at_s - (wall_s + took_s / 2)


def _receive_transfer(connection: Connection[SentT, ReceivedT]) -> None:
    chunk = memoryview(bytearray(_CHUNK_NBYTES))

    def into(_: ReceivedT, nbytes: int) -> list[memoryview]:
        # All bytes go to one place, for nobody looks at them.
        return [chunk] * _CHUNKS if nbytes == TRANSFER_NBYTES else []

    _checked(connection.receive(into), Transfer, connection.peer)


def _checked(message: Message | None, kind: type[ExpectedT], peer: str) -> ExpectedT:
    if message is None:
        raise ConnectionLost(f"{peer}: ended the connection early")
    if not isinstance(message, kind):
        raise MalformedMessage(
            f"{peer}: sent {type(message).__name__} where {kind.__name__} is expected"
        )
    return message
