"""Defines the messages between doctors.

A connection serves one purpose: the client asks whether a doctor is there, measures the link to it,
or gets what it measured.
"""

from __future__ import annotations

from typing import TypeAlias

from keepstep.monitor.preflight.examination import NodeExamination
from keepstep.transport import Codec, Message, Protocol, VersionRange


class Greet(Message, frozen=True, kw_only=True):
    """Asks whether a doctor is there."""


class Greeting(Message, frozen=True, kw_only=True):
    """A doctor is there, on the node of this name."""

    name: str


class MeasureLink(Message, frozen=True, kw_only=True):
    """Asks the doctor to take part in a measurement once it is in this round."""

    round: int


class Readiness(Message, frozen=True, kw_only=True):
    """Whether the doctor takes part; then pings and transfers follow."""

    is_ready: bool


class Ping(Message, frozen=True, kw_only=True):
    """Asks for a `Pong` at once."""


class Pong(Message, frozen=True, kw_only=True):
    """Answers a `Ping` with the wall clock's time, in seconds."""

    at_s: float


class Transfer(Message, frozen=True, kw_only=True):
    """Carries the bytes by which a link's rate is measured as its payload."""


class TransferReceived(Message, frozen=True, kw_only=True):
    """A `Transfer` has arrived whole."""


class GetExamination(Message, frozen=True, kw_only=True):
    """Asks for what the doctor measured, once it is done, for the doctor at `address`."""

    address: str


class Examined(Message, frozen=True, kw_only=True):
    """The doctor's measurements; None if it ends without."""

    examination: NodeExamination | None


Request: TypeAlias = Greet | MeasureLink | Ping | Transfer | GetExamination
Reply: TypeAlias = Greeting | Readiness | Pong | Transfer | TransferReceived | Examined

PROTOCOL = Protocol(
    name="doctor",
    versions=VersionRange(1, 1),
    requests=Codec[Request](Greet, MeasureLink, Ping, Transfer, GetExamination),
    replies=Codec[Reply](Greeting, Readiness, Pong, Transfer, TransferReceived, Examined),
)
"""Spoken between doctors."""
