"""Encodes the first message of each end: its protocol, versions, role, node and nonce.

Layout, big-endian, at most 512 bytes:

    magic (4) | length of the whole hello (2)
    role (1) | oldest version (2) | newest version (2) | nonce (32)
    length (1) and protocol name | length (1) and node name | anything a later version adds

A hello is not authenticated by itself: the proofs that follow cover both hellos byte by byte,
including fields unknown to this version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from keepstep.transport.errors import MalformedMessage, quote
from keepstep.transport.protocol import Role, VersionRange, check_name

MAX_HELLO_NBYTES = 512
NONCE_NBYTES = 32
PREFIX_NBYTES = 6

_PREFIX = struct.Struct(">4sH")
_FIXED = struct.Struct(f">BHH{NONCE_NBYTES}s")
_MAGIC = b"KSH1"
_ROLES = {1: Role.CLIENT, 2: Role.SERVER}
_ROLE_NUMBERS = {role: number for number, role in _ROLES.items()}


@dataclass(frozen=True, slots=True)
class Hello:
    """One end's description of itself."""

    role: Role
    protocol: str
    versions: VersionRange
    node: str
    nonce: bytes

    def __post_init__(self) -> None:
        check_name("a protocol", self.protocol)
        check_name("a node", self.node)
        if len(self.nonce) != NONCE_NBYTES:
            raise ValueError(f"a nonce has {NONCE_NBYTES} bytes, not {len(self.nonce)}")

    def encode(self) -> bytes:
        """Return the hello as bytes."""
        body = _FIXED.pack(
            _ROLE_NUMBERS[self.role], self.versions.oldest, self.versions.newest, self.nonce
        )
        for name in (self.protocol.encode(), self.node.encode()):
            body += len(name).to_bytes(1, "big") + name
        return _PREFIX.pack(_MAGIC, PREFIX_NBYTES + len(body)) + body


def remaining_nbytes(prefix: bytes, peer: str) -> int:
    """Return how many bytes of a hello follow its prefix.

    Raises:
        MalformedMessage: this is no prefix of a hello.
    """
    magic, nbytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC or not PREFIX_NBYTES + _FIXED.size <= nbytes <= MAX_HELLO_NBYTES:
        raise MalformedMessage(
            f"{peer}: does not speak this transport (it began with {prefix!r}); is the address "
            f"that of another service, or of a keepstep older than this one?"
        )
    return int(nbytes) - PREFIX_NBYTES


def decode(body: bytes, peer: str) -> Hello:
    """Return the hello whose bytes after the prefix are these.

    Raises:
        MalformedMessage: the bytes are no hello.
    """
    try:
        number, oldest, newest, nonce = _FIXED.unpack_from(body)
        protocol, end = _name_at(body, _FIXED.size)
        node, _ = _name_at(body, end)
        return Hello(_ROLES[number], protocol, VersionRange(oldest, newest), node, nonce)
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise MalformedMessage(f"{peer}: sent a damaged hello: {quote(str(error))}") from error


def _name_at(body: bytes, offset: int) -> tuple[str, int]:
    end = offset + 1 + body[offset]
    if end > len(body):
        raise ValueError("a name is longer than the hello")
    return body[offset + 1 : end].decode(), end
