"""Claims about the snapshot server's messages: they arrive as they were sent, or not at all."""

from __future__ import annotations

from typing import get_args

import pytest

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory import messages
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup, ShardLocation
from keepstep.checkpoint.snapshot.memory.messages import (
    CONTROL_PROTOCOL,
    SNAPSHOT_PROTOCOL,
    AgentCommand,
    AgentReply,
    AgentRequest,
    AlreadyStored,
    Begin,
    Begun,
    BoxBytes,
    ClientRequest,
    CommitSnapshot,
    EndPersist,
    EndServer,
    Fence,
    FinishProtection,
    Holdings,
    IndexBytes,
    IndexPending,
    ListHoldings,
    NodeHoldings,
    Opened,
    OpenGeneration,
    OpenShard,
    PartListing,
    Persisted,
    PersistFailed,
    PersistPart,
    PersistTask,
    PlanBytes,
    PlanPending,
    Protected,
    Published,
    PublishFailed,
    PublishManifest,
    RankHolder,
    ReadBoxes,
    ReadIndex,
    ReadPlan,
    ReadStripe,
    ReadTable,
    Rebuild,
    Refused,
    ReportHoldings,
    RestoreChecked,
    Seal,
    Sealed,
    SealedRanks,
    ServerEvent,
    ServerReply,
    Serving,
    ShardBox,
    StripeBytes,
    Table,
    TakeOutput,
    Verify,
)
from keepstep.transport import MalformedMessage

SNAPSHOT = SnapshotId(3, 40)
TABLE = (ShardLocation(rank=2, offset=0, nbytes=90, index_offset=80, crc=2**32 - 1),)
GROUP = ErasureGroup(generation=3, addresses=("tcp:a:1", "tcp:b:2"), position=1, parity=1)
TASK = PersistTask(
    "s3://bucket/job",
    SNAPSHOT,
    13,
    "9-1a",
    (RankHolder(None, (0,)), RankHolder("tcp:b:2", (1,))),
    compression="zstd",
    retention=Retention(last=3, every=100, behind=7),
)
HELD = (SealedRanks(SNAPSHOT, (0, 1)),)

REQUESTS: list[ClientRequest] = [
    Begin(snapshot=SNAPSHOT, rank=1, nbytes=2**40, mapped=(1, 2), discard_uncommitted=True),
    Seal(snapshot=SNAPSHOT, rank=1, index_offset=4096, index_nbytes=100),
    ListHoldings(),
    ReadIndex(snapshot=SNAPSHOT, rank=1, wait=True),
    OpenShard(snapshot=SNAPSHOT, rank=1),
    ReadBoxes(
        snapshot=SNAPSHOT,
        boxes=(ShardBox(1, "model/w", Box((1, 0), (2, 3))), ShardBox(0, "scalar", Box((), ()))),
        background=True,
    ),
    ReadStripe(snapshot=SNAPSHOT, stripe=1, offset=64, count=None),
    ReadTable(snapshot=SNAPSHOT, position=1),
    ReadPlan(attempt="9-1a", stage="boxes", holder=1),
]
REPLIES: list[ServerReply] = [
    Refused(reason="no"),
    Begun(buffer=3, capacity=2**40, dropped=(1,)),
    Sealed(),
    Holdings(sealed=HELD),
    IndexBytes(),
    IndexPending(),
    Opened(capacity=4096),
    BoxBytes(),
    StripeBytes(table=TABLE),
    Table(table=TABLE),
    PlanBytes(),
    PlanPending(),
]
COMMANDS: list[AgentCommand] = [
    OpenGeneration(group=GROUP),
    Fence(generation=3),
    Rebuild(snapshot=SNAPSHOT, group=GROUP, lost=(1,), ranks=(2, 3)),
    FinishProtection(),
    Verify(),
    CommitSnapshot(snapshot=SnapshotId(4, -1)),
    PersistPart(task=TASK, part=1),
    EndPersist(attempt="9-1a"),
    PublishManifest(task=TASK, listings=(PartListing("parts/0.json", 100, 7, 2**64 - 1),)),
    ReportHoldings(),
    TakeOutput(),
    EndServer(),
]
EVENTS: list[ServerEvent] = [
    Serving(address="tcp:[::1]:9", pid=1),
    Protected(snapshot=SNAPSHOT, nbytes=2**40),
    RestoreChecked(snapshot=SNAPSHOT, nbytes=7, differing=("model/w",), is_wrong=True),
    Persisted(
        snapshot=SNAPSHOT, attempt="9-1a", listing=PartListing("parts/0.json", 100, 7, 2**64 - 1)
    ),
    AlreadyStored(snapshot=SNAPSHOT, attempt="9-1a"),
    PersistFailed(snapshot=SNAPSHOT, attempt="9-1a", reason="the disk is full"),
    Published(snapshot=SNAPSHOT),
    PublishFailed(snapshot=SNAPSHOT, reason="the disk is full"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_arrive_as_they_were_sent(request_: ClientRequest) -> None:
    codec = SNAPSHOT_PROTOCOL.requests
    assert codec.decode(codec.encode(request_), "peer") == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_arrive_as_they_were_sent(reply: ServerReply) -> None:
    codec = SNAPSHOT_PROTOCOL.replies
    assert codec.decode(codec.encode(reply), "peer") == reply


@pytest.mark.parametrize("command", COMMANDS, ids=lambda message: type(message).__name__)
def test_commands_arrive_as_they_were_sent(command: AgentCommand) -> None:
    codec = CONTROL_PROTOCOL.requests
    request = AgentRequest(number=7, command=command)
    assert codec.decode(codec.encode(request), "peer") == request


@pytest.mark.parametrize(
    "message",
    [
        *EVENTS,
        AgentReply(number=7, result=Refused(reason="no")),
        AgentReply(
            number=7,
            result=NodeHoldings(sealed=HELD, protected=(SNAPSHOT,), nbytes=9, committed=SNAPSHOT),
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_events_and_replies_to_the_agent_arrive_as_they_were_sent(
    message: AgentReply | ServerEvent,
) -> None:
    codec = CONTROL_PROTOCOL.replies
    assert codec.decode(codec.encode(message), "peer") == message


@pytest.mark.parametrize(
    ("union", "examples"),
    [
        (messages.ClientRequest, REQUESTS),
        (messages.ServerReply, REPLIES),
        (messages.AgentCommand, COMMANDS),
        (messages.ServerEvent, EVENTS),
    ],
)
def test_every_message_has_an_example_here(union: object, examples: list[object]) -> None:
    assert [type(example) for example in examples] == list(get_args(union))


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"ReadTable","snapshot":{"generation":1,"step":1},"position":-1}',
        b'{"type":"ReadStripe","snapshot":{"generation":1,"step":1},"stripe":0,"count":-5}',
        b'{"type":"Begin","snapshot":{"generation":1,"step":1},"rank":0,"nbytes":-1,"mapped":[],'
        b'"discard_uncommitted":false}',
        b'{"type":"ReadBoxes","snapshot":{"generation":1,"step":1},"background":false,'
        b'"boxes":[{"rank":0,"key":"w","box":{"offset":[-1],"shape":[2]}}]}',
        b'{"type":"ReadBoxes","snapshot":{"generation":1,"step":1},"background":false,'
        b'"boxes":[{"rank":0,"key":"w","box":{"offset":[1,1],"shape":[2]}}]}',
        b'{"type":"ReadPlan","attempt":"a","stage":"boxes","holder":-1}',
        b'{"type":"ReadPlan","attempt":"a","stage":"shares","holder":0}',
    ],
)
def test_requests_with_impossible_sizes_are_rejected(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        SNAPSHOT_PROTOCOL.requests.decode(body, "peer")


def test_a_group_without_the_position_is_rejected() -> None:
    body = CONTROL_PROTOCOL.requests.encode(
        AgentRequest(number=1, command=OpenGeneration(group=GROUP))
    )
    with pytest.raises(MalformedMessage, match="is in no group"):
        CONTROL_PROTOCOL.requests.decode(body.replace(b'"position":1', b'"position":2'), "peer")
