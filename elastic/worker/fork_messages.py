"""Defines the messages between an agent and its fork server, over a socket pair of the two."""

from __future__ import annotations

from typing import TypeAlias

from keepstep.transport import Codec, Message, Protocol, VersionRange


class PassProgressBoard(Message, frozen=True, kw_only=True):
    """The progress board of the next worker rides on this message."""


class PassStartSignal(Message, frozen=True, kw_only=True):
    """The reading end of a pipe rides on this message: the next worker waits for a byte from it.

    If the agent closes the pipe without one, the worker ends: the agent does not know it.
    """


class ForkWorker(Message, frozen=True, kw_only=True):
    """Fork a worker; its connection to the agent rides on this message."""


class Prepared(Message, frozen=True, kw_only=True):
    """PyTorch is imported, and workers can be forked at once."""


class Forked(Message, frozen=True, kw_only=True):
    """A worker was forked; it is a child of the agent.

    Args:
        process: its id.
    """

    process: int


class Unable(Message, frozen=True, kw_only=True):
    """Nothing can be forked, now or later; the fork server ends next."""

    reason: str


ForkRequest: TypeAlias = PassProgressBoard | PassStartSignal | ForkWorker
"""Messages that an agent sends."""

ForkReply: TypeAlias = Prepared | Forked | Unable
"""Messages that a fork server sends."""

FORK_PROTOCOL = Protocol(
    name="fork",
    versions=VersionRange(1, 1),  # One keepstep runs both ends.
    requests=Codec[ForkRequest](PassProgressBoard, PassStartSignal, ForkWorker),
    replies=Codec[ForkReply](Prepared, Forked, Unable),
)
"""Spoken over the socket pair; the agent is the client."""
