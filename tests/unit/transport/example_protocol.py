"""The protocol that the tests speak, and in-memory ends of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from keepstep.transport import Codec, Identity, Message, Protocol, VersionRange
from keepstep.transport.handshake import Handshake
from keepstep.transport.protocol import Side

SECRET = bytes(range(32))
OTHER_SECRET = bytes(range(1, 33))


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Place:
    step: int
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError("a step is not negative")


class Ask(Message):
    place: Place
    color: Color = Color.RED
    sizes: Mapping[str, int] = {}


class Tell(Message):
    text: str
    nbytes: int = 0


class Fail(Message):
    reason: str


REQUESTS = Codec[Ask](Ask)
REPLIES = Codec[Tell | Fail](Tell, Fail)
PROTOCOL = Protocol(name="example", versions=VersionRange(2, 4), requests=REQUESTS, replies=REPLIES)

CLIENT = Identity("client-node", SECRET)
SERVER = Identity("server-node", SECRET)
ASK = Ask(place=Place(7, (2, 3)), color=Color.BLUE, sizes={"weight": 6})


def protocol(versions: VersionRange = PROTOCOL.versions, name: str = "example", limit: int = 2**24):
    return Protocol(
        name=name, versions=versions, requests=REQUESTS, replies=REPLIES, max_body_nbytes=limit
    )


def client_handshake(
    side: Side | None = None, secret: bytes | None = SECRET, nonce: int = 1
) -> Handshake:
    return Handshake(side or PROTOCOL.client, "client-node", secret, bytes([nonce] * 32), "server")


def server_handshake(
    side: Side | None = None, secret: bytes | None = SECRET, nonce: int = 2
) -> Handshake:
    return Handshake(side or PROTOCOL.server, "server-node", secret, bytes([nonce] * 32), "client")


def feed(handshake: Handshake, stream: bytearray) -> bytes:
    """Give a handshake what it wants of a stream; return what it answers."""
    answer = b""
    while handshake.wanted_nbytes and len(stream) >= handshake.wanted_nbytes:
        count = handshake.wanted_nbytes
        data = bytes(stream[:count])
        del stream[:count]
        answer += handshake.receive(data)
    return answer


def exchange(client: Handshake, server: Handshake) -> None:
    """Let two ends talk until neither says anything."""
    to_server, to_client = bytearray(client.start()), bytearray(server.start())
    while to_server or to_client:
        before = len(to_server), len(to_client), client.wanted_nbytes, server.wanted_nbytes
        to_client += feed(server, to_server)
        to_server += feed(client, to_client)
        if before == (
            len(to_server), len(to_client), client.wanted_nbytes, server.wanted_nbytes
        ):  # fmt: skip
            return
