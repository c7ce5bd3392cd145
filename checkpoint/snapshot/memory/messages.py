"""Defines the messages of the snapshot server, as its clients and its agent exchange them with it.

Clients are workers of the server's node, ranks elsewhere, and other nodes' servers. Each request
has one reply, in the order of the requests, and any may be `Refused`. Replies whose names end in
`Bytes` carry their data as the frame's payload.

One agent at a time is connected to the server's control socket. Its requests are numbered, for the
server sends events between the replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.erasure_group import Count, ErasureGroup, ShardTable
from keepstep.transport import Codec, Message, Protocol, VersionRange

MAX_INDEX_NBYTES = 2**28
"""The largest shard index, or part of one, that a client accepts; documents are of any size."""

_MAX_REQUEST_NBYTES = 2**28  # A restore into another layout may ask for very many boxes at once.


PlanStage: TypeAlias = Literal["boxes", "chunks", "content"]
"""Messages between servers that plan a checkpoint (`snapshot.server.plan_exchange`)."""


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A box, in global coordinates, of the tensor `key` as a rank's shard holds it."""

    rank: Count
    key: str
    box: Box


@dataclass(frozen=True, slots=True)
class SealedRanks:
    """The ranks of a node that have sealed a snapshot, in ascending order."""

    snapshot: SnapshotId
    ranks: tuple[int, ...]


class Refused(Message, frozen=True, kw_only=True):
    """Replies to any request that cannot be met; the reason names the remedy.

    `is_incomplete`: the ranks here have ended the snapshot's generation without sealing it.
    """

    reason: str
    is_incomplete: bool = False


class Begin(Message, frozen=True, kw_only=True):
    """Asks for a buffer to write a shard into. Replied to by `Begun`.

    `mapped` are the numbers of the buffers that the client has mapped. `discard_uncommitted`: the
    rank's last snapshot is given up, for another rank will never seal it.
    """

    snapshot: SnapshotId
    rank: Count
    nbytes: Count
    mapped: tuple[int, ...]
    discard_uncommitted: bool


class Begun(Message, frozen=True, kw_only=True):
    """Gives a buffer of `capacity` bytes; its descriptor comes along unless it is mapped already.

    `dropped` are mapped buffers that the server has released.
    """

    buffer: int
    capacity: Count
    dropped: tuple[int, ...]


class Seal(Message, frozen=True, kw_only=True):
    """Declares a shard complete, with its index at a place in its buffer."""

    snapshot: SnapshotId
    rank: Count
    index_offset: Count
    index_nbytes: Count


class Sealed(Message, frozen=True, kw_only=True):
    """Replies to `Seal`."""


class ListHoldings(Message, frozen=True, kw_only=True):
    """Asks which snapshots the node's ranks have sealed. Replied to by `Holdings`."""


class Holdings(Message, frozen=True, kw_only=True):
    """The sealed snapshots of a node."""

    sealed: tuple[SealedRanks, ...]


class ReadIndex(Message, frozen=True, kw_only=True):
    """Asks for the index of a sealed shard. Replied to by `IndexBytes` or `IndexPending`.

    `wait`: the shard may still have to be rebuilt here.
    """

    snapshot: SnapshotId
    rank: Count
    wait: bool


class IndexBytes(Message, frozen=True, kw_only=True):
    """Carries a shard's index, as its writer encoded it (`checkpoint.format.layout.boxes`)."""


class IndexPending(Message, frozen=True, kw_only=True):
    """The shard is still being rebuilt; ask again."""


class OpenShard(Message, frozen=True, kw_only=True):
    """Asks to map a sealed shard for reading (Unix sockets only). Replied to by `Opened`."""

    snapshot: SnapshotId
    rank: Count


class Opened(Message, frozen=True, kw_only=True):
    """Comes with the descriptor of a shard's buffer of `capacity` bytes."""

    capacity: Count


class ReadBoxes(Message, frozen=True, kw_only=True):
    """Asks for boxes of sealed shards. Replied to by `BoxBytes`.

    `background`: the server sends no faster than it may during training.
    """

    snapshot: SnapshotId
    boxes: tuple[ShardBox, ...]
    background: bool


class BoxBytes(Message, frozen=True, kw_only=True):
    """Carries the boxes that were asked for, one after the other, each in C order."""


class ReadStripe(Message, frozen=True, kw_only=True):
    """Asks for bytes of the block that the node holds of a stripe. Replied to by `StripeBytes`.

    `offset` and `count` are bytes in the block; `count` None means all. What lies beyond the
    block's end is not sent. `background` as in `ReadBoxes`.
    """

    snapshot: SnapshotId
    stripe: Count
    offset: Count = 0
    count: Count | None = None
    background: bool = False


class StripeBytes(Message, frozen=True, kw_only=True):
    """Carries bytes of a block; of a data block, with the table of the bytes it is cut from."""

    table: ShardTable | None


class ReadTable(Message, frozen=True, kw_only=True):
    """Asks where the group's node at a position has its shards. Replied to by `Table`."""

    snapshot: SnapshotId
    position: Count


class Table(Message, frozen=True, kw_only=True):
    """Replies to `ReadTable`."""

    table: ShardTable


class ReadPlan(Message, frozen=True, kw_only=True):
    """Asks what the server has for a holder, by its number, at a stage of an attempt to store.

    Replied to by `PlanBytes` or `PlanPending`. Without a `holder`: for the server that publishes.
    """

    attempt: str
    stage: PlanStage
    holder: Count | None


class PlanBytes(Message, frozen=True, kw_only=True):
    """Carries what was asked for, as MessagePack (`checkpoint.snapshot.server.plan_exchange`)."""


class PlanPending(Message, frozen=True, kw_only=True):
    """The server has not come to this stage of the attempt yet; ask again."""


ClientRequest: TypeAlias = (
    Begin
    | Seal
    | ListHoldings
    | ReadIndex
    | OpenShard
    | ReadBoxes
    | ReadStripe
    | ReadTable
    | ReadPlan
)
ServerReply: TypeAlias = (
    Refused
    | Begun
    | Sealed
    | Holdings
    | IndexBytes
    | IndexPending
    | Opened
    | BoxBytes
    | StripeBytes
    | Table
    | PlanBytes
    | PlanPending
)

SNAPSHOT_PROTOCOL: Protocol[ClientRequest, ServerReply] = Protocol(
    name="snapshot",
    versions=VersionRange(4, 4),
    requests=Codec[ClientRequest](*get_args(ClientRequest)),
    replies=Codec[ServerReply](*get_args(ServerReply)),
    max_body_nbytes=_MAX_REQUEST_NBYTES,
)


@dataclass(frozen=True, slots=True)
class RankHolder:
    """Who holds the shards of some ranks: another node's server, or this one (`address` None)."""

    address: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PersistTask:
    """A snapshot to be written to the storage at a URL, and who holds its shards.

    `generation` is the one that the checkpoint has in storage. `attempt` names this attempt to
    write it; no other attempt ever has the name (FORMAT.md). `compression` is as for
    `checkpoint.save`. `retention` says which older checkpoints to keep then; None: all.
    """

    url: str
    snapshot: SnapshotId
    generation: Count
    attempt: str
    holders: tuple[RankHolder, ...]
    compression: Literal["zstd"] | None = None
    retention: Retention | None = None


@dataclass(frozen=True, slots=True)
class PartListing:
    """The stored object that lists one node's part: name, size in bytes, CRC-32C (FORMAT.md).

    `content` is the sum of the hashes of the part's chunks, for the digest.
    """

    name: str
    nbytes: Count
    crc32c: Count
    content: Count


class OpenGeneration(Message, frozen=True, kw_only=True):
    """Opens a generation: older ones write nothing more, this one's group protects snapshots."""

    group: ErasureGroup


class Fence(Message, frozen=True, kw_only=True):
    """Ends what a generation may write; it comes before its collectives are aborted."""

    generation: Count


class Rebuild(Message, frozen=True, kw_only=True):
    """Begins to rebuild shards of a lost node.

    `group` protected them, seen from the node that held them (`position` is its own); `lost` are
    the positions of all nodes that are lost.
    """

    snapshot: SnapshotId
    group: ErasureGroup
    lost: tuple[Count, ...]
    ranks: tuple[Count, ...]


class FinishProtection(Message, frozen=True, kw_only=True):
    """Waits a moment for the parity that can still be completed."""


class Verify(Message, frozen=True, kw_only=True):
    """Forgets snapshots whose memory has changed since they were sealed."""


class CommitSnapshot(Message, frozen=True, kw_only=True):
    """Frees everything older than a snapshot, which is the one to resume from."""

    snapshot: SnapshotId


class PersistPart(Message, frozen=True, kw_only=True):
    """Begins to write this node's part, numbered `part`.

    `Persisted`, `AlreadyStored` or `PersistFailed` follows.

    Both repeat the task's `attempt`: an earlier attempt may end after the next one has begun. The
    snapshot is kept until `EndPersist`, for other holders may need pieces of it.
    """

    task: PersistTask
    part: Count


class EndPersist(Message, frozen=True, kw_only=True):
    """Ends an attempt: its part is not written any further, and its snapshot not kept for it."""

    attempt: str


class PublishManifest(Message, frozen=True, kw_only=True):
    """Begins to write the manifest of all nodes' parts. `Published` or `PublishFailed` follows."""

    task: PersistTask
    listings: tuple[PartListing, ...]


class ReportHoldings(Message, frozen=True, kw_only=True):
    """Asks for the node's holdings alone; every reply to the agent has them."""


class TakeOutput(Message, frozen=True, kw_only=True):
    """Comes with the descriptor of a later agent's output, which becomes that of the server."""


class EndServer(Message, frozen=True, kw_only=True):
    """Ends the server once it has replied, and frees all that it holds."""


AgentCommand: TypeAlias = (
    OpenGeneration
    | Fence
    | Rebuild
    | FinishProtection
    | Verify
    | CommitSnapshot
    | PersistPart
    | EndPersist
    | PublishManifest
    | ReportHoldings
    | TakeOutput
    | EndServer
)


class AgentRequest(Message, frozen=True, kw_only=True):
    """A command of the agent. Replied to by the `AgentReply` of the same number."""

    number: int
    command: AgentCommand


class NodeHoldings(Message, frozen=True, kw_only=True):
    """The node's holdings: sealed snapshots, those with complete parity, bytes of memory.

    `committed` is the newest snapshot that an agent has named as committed.
    """

    sealed: tuple[SealedRanks, ...]
    protected: tuple[SnapshotId, ...]
    nbytes: Count
    committed: SnapshotId


class AgentReply(Message, frozen=True, kw_only=True):
    """Replies to the agent's request of this number."""

    number: int
    result: NodeHoldings | Refused


class Serving(Message, frozen=True, kw_only=True):
    """The first message to an agent: other nodes reach the server, process `pid`, at `address`."""

    address: str
    pid: int


class Protected(Message, frozen=True, kw_only=True):
    """All ranks of the node have sealed a snapshot, and the node's parity of it is complete.

    `nbytes` is the memory that the server uses.
    """

    snapshot: SnapshotId
    nbytes: Count


class RestoreChecked(Message, frozen=True, kw_only=True):
    """The node's ranks have restored and sealed; this is compared with what they restored from.

    Args:
        snapshot: the one that they have sealed.
        nbytes: how much of it was compared: what the node holds of the older snapshot.
        differing: tensors that differ, the first few.
        is_wrong: the model, an optimizer or a generator differs, or what was sealed cannot be read;
            the snapshot is forgotten.
    """

    snapshot: SnapshotId
    nbytes: Count
    differing: tuple[str, ...]
    is_wrong: bool


class Persisted(Message, frozen=True, kw_only=True):
    """This node's part of a checkpoint is written, and listed by an object."""

    snapshot: SnapshotId
    attempt: str
    listing: PartListing


class AlreadyStored(Message, frozen=True, kw_only=True):
    """The checkpoint is committed, by an attempt whose outcome the job has not learnt."""

    snapshot: SnapshotId
    attempt: str


class PersistFailed(Message, frozen=True, kw_only=True):
    """This node's part of a checkpoint could not be written."""

    snapshot: SnapshotId
    attempt: str
    reason: str


class Published(Message, frozen=True, kw_only=True):
    """The manifest of a checkpoint is written: the checkpoint is complete."""

    snapshot: SnapshotId


class PublishFailed(Message, frozen=True, kw_only=True):
    """The manifest of a checkpoint could not be written."""

    snapshot: SnapshotId
    reason: str


ServerEvent: TypeAlias = (
    Serving
    | Protected
    | RestoreChecked
    | Persisted
    | AlreadyStored
    | PersistFailed
    | Published
    | PublishFailed
)

CONTROL_PROTOCOL: Protocol[AgentRequest, AgentReply | ServerEvent] = Protocol(
    name="snapshot control",
    versions=VersionRange(2, 2),
    requests=Codec[AgentRequest](AgentRequest),
    replies=Codec[AgentReply | ServerEvent](*get_args(AgentReply | ServerEvent)),
)
