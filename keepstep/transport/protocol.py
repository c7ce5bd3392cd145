"""Describes a protocol between two processes: its name, versions, messages and roles.

A protocol is a value that both ends import. The client sends `requests`, the server `replies`
(events included); each end sees it as a `Side`, which holds the messages that end sends and
receives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from keepstep.transport.codec import Codec, Message

MIN_SECRET_NBYTES = 16
MAX_NAME_NBYTES = 128
DEFAULT_MAX_BODY_NBYTES = 16 * 2**20

ClientT = TypeVar("ClientT", bound=Message)
ServerT = TypeVar("ServerT", bound=Message)
SentT = TypeVar("SentT", bound=Message)
ReceivedT = TypeVar("ReceivedT", bound=Message)


class Role(Enum):
    """A process's end of a connection: the client connects, the server accepts."""

    CLIENT = "client"
    SERVER = "server"

    @property
    def other(self) -> Role:
        """The role of the peer."""
        return Role.SERVER if self is Role.CLIENT else Role.CLIENT


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The protocol versions that one side speaks, from `oldest` to `newest`, both included."""

    oldest: int
    newest: int

    def __post_init__(self) -> None:
        if not 1 <= self.oldest <= self.newest < 2**16:
            raise ValueError(
                f"versions {self.oldest} to {self.newest} are no range within 1 to 65535"
            )

    def highest_common(self, other: VersionRange) -> int | None:
        """Return the newest version that both sides speak; None if there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.oldest}"
        return f"versions {self.oldest} to {self.newest}"


@dataclass(frozen=True, slots=True)
class Side(Generic[SentT, ReceivedT]):
    """A protocol as one end sees it."""

    role: Role
    protocol: str
    versions: VersionRange
    sends: Codec[SentT]
    receives: Codec[ReceivedT]
    max_body_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol(Generic[ClientT, ServerT]):
    """A protocol that both ends of a connection agree on beforehand.

    Args:
        name: a short ASCII name such as "snapshot"; different protocols never connect.
        versions: the versions that this build speaks; the highest common one is used.
        requests: messages of clients.
        replies: messages of servers.
        max_body_nbytes: the longest encoded message; payloads are not part of it.
    """

    name: str
    versions: VersionRange
    requests: Codec[ClientT]
    replies: Codec[ServerT]
    max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES

    def __post_init__(self) -> None:
        check_name("a protocol", self.name)
        if not 0 < self.max_body_nbytes < 2**32:
            raise ValueError(
                f"max_body_nbytes is {self.max_body_nbytes}; it must be in 1 to 2**32 - 1"
            )

    @property
    def client(self) -> Side[ClientT, ServerT]:
        """The protocol as the client sees it."""
        return Side(
            Role.CLIENT, self.name, self.versions, self.requests, self.replies, self.max_body_nbytes
        )

    @property
    def server(self) -> Side[ServerT, ClientT]:
        """The protocol as the server sees it."""
        return Side(
            Role.SERVER, self.name, self.versions, self.replies, self.requests, self.max_body_nbytes
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """This side's node, and the job's secret by which it proves that it belongs to the job."""

    node: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_name("a node", self.node)
        check_secret(self.secret)


def check_name(what: str, name: str) -> None:
    """Raise ValueError unless a name can be sent in a hello and printed in an error."""
    if not (name.isprintable() and 0 < len(name.encode(errors="replace")) <= MAX_NAME_NBYTES):
        raise ValueError(
            f"{name!r} cannot name {what}: use 1 to {MAX_NAME_NBYTES} bytes of printable text"
        )


def check_secret(secret: bytes) -> None:
    """Raise ValueError if a secret is so short that it could be guessed."""
    if len(secret) < MIN_SECRET_NBYTES:
        raise ValueError(
            f"the job's secret has {len(secret)} bytes; use {MIN_SECRET_NBYTES} random ones or more"
        )
