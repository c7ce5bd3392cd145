"""Messages between a rank and the process that writes its checkpoints, over a socket pair.

The rank asks, one request at a time. `UseBuffer` and `UsePlan` have no reply; `WritePart` and
`Publish` are answered by `Written` and `Published`, or by `Failed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, get_args

import msgspec

from keepstep.checkpoint.format.layout.boxes import Entry
from keepstep.checkpoint.format.stored.manifest import PartEntry
from keepstep.checkpoint.format.stored.shared_plan import TensorPlan, WriterPlan
from keepstep.transport import Codec, Message, Protocol, VersionRange


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """Everything about this rank's part of a save but its bytes; the same while the layout is.

    Attributes:
        rank: this rank.
        own: the chunks that it writes.
        tensors: all tensors, on rank 0.
        entries: where the boxes that contain the chunks lie in the buffer.
    """

    rank: int
    own: WriterPlan
    tensors: TensorPlan
    entries: tuple[Entry, ...]

    def encode(self) -> bytes:
        """Return the plan as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> PartPlan:
        """Return the plan that `encode` was called on."""
        return msgspec.json.decode(data, type=cls)


class UseBuffer(Message, frozen=True, kw_only=True):
    """Read from this buffer from now on; its descriptor rides on the message."""

    nbytes: int


class UsePlan(Message, frozen=True, kw_only=True):
    """Follow this plan from now on; the payload is a `PartPlan`."""


class WritePart(Message, frozen=True, kw_only=True):
    """Write this rank's chunks.

    `directory` is the rank's current one, which relative URLs are relative to.
    """

    url: str
    directory: str
    step: int
    generation: int
    attempt: str


class Publish(Message, frozen=True, kw_only=True):
    """Commit the attempt whose part was written last; the payload is all `PartReport`s."""


class Written(Message, frozen=True, kw_only=True):
    """The part is written and durable."""

    listing: PartEntry


class Published(Message, frozen=True, kw_only=True):
    """The checkpoint is committed."""


class Failed(Message, frozen=True, kw_only=True):
    """The request failed.

    `error` is the name of a class in `keepstep.checkpoint.errors`, or any other's.
    """

    error: str
    reason: str


WriterRequest: TypeAlias = UseBuffer | UsePlan | WritePart | Publish
WriterReply: TypeAlias = Written | Published | Failed

WRITER_PROTOCOL: Protocol[WriterRequest, WriterReply] = Protocol(
    name="checkpoint writer",
    versions=VersionRange(1, 1),
    requests=Codec[WriterRequest](*get_args(WriterRequest)),
    replies=Codec[WriterReply](*get_args(WriterReply)),
)
