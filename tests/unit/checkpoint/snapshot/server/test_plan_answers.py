"""Claims about what a snapshot server answers and believes when servers plan together."""

from __future__ import annotations

from typing import cast

import pytest

from keepstep.checkpoint.errors import LayoutMismatch, SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import (
    DocumentBytes,
    PlanBytes,
    PlanInputBytes,
    PlanReply,
    PlanRequest,
    RankHolder,
    ReadDocumentDigests,
    ReadDocuments,
    ReadPlan,
    ReadPlanInput,
    ReadTensorPlan,
    Sealed,
    Unchanged,
)
from keepstep.checkpoint.snapshot.server.holder_servers import HolderServers, PlanServer
from keepstep.checkpoint.snapshot.server.plan_answers import PlanAnswers
from keepstep.checkpoint.snapshot.server.plan_exchange import PlanExchange
from keepstep.checkpoint.snapshot.server.plan_shares import PlannedShare
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from tests.unit.checkpoint.snapshot.server.plan_nodes import Indexes, Nodes, index_of

SNAPSHOT = SnapshotId(1, 1)


def answers_of(*keys: str) -> PlanAnswers:
    """Return what a node answers whose one rank, 3, has these tensors and a document."""
    entries = [
        Entry(
            key=key,
            dtype="uint8",
            global_shape=(4,),
            box=Box.whole((4,)),
            byte_offset=0,
            nbytes=4,
        )
        for key in keys
    ]
    held = Indexes({3: index_of(entries, {"values": {"loss": float("inf")}})})
    return PlanAnswers(cast(SnapshotMemory, held))


def read_input(rank: int = 3, planner: int = 0) -> ReadPlanInput:
    return ReadPlanInput(snapshot=SNAPSHOT, ranks=(rank,), planner=planner, planners=2, known=None)


def test_a_rank_that_is_not_held_is_refused() -> None:
    requests: list[PlanRequest] = [
        read_input(rank=4),
        ReadDocumentDigests(snapshot=SNAPSHOT, ranks=(3, 4)),
        ReadDocuments(snapshot=SNAPSHOT, rank=4, names=()),
    ]
    for request in requests:
        with pytest.raises(SnapshotUnavailable, match="rank 4"):
            answers_of("model/w").answer_plan(request)


def test_a_planner_beyond_the_last_and_a_document_that_is_not_held_are_refused() -> None:
    with pytest.raises(ValueError, match="no planner 2 of 2"):
        answers_of("model/w").answer_plan(read_input(planner=2))
    with pytest.raises(ValueError, match="rank 3 does not have all of the documents"):
        answers_of().answer_plan(
            ReadDocuments(snapshot=SNAPSHOT, rank=3, names=("values", "other"))
        )


def test_documents_are_sent_as_they_are_held() -> None:
    """Also numbers that strict JSON does not have."""
    reply, payload = answers_of().answer_plan(
        ReadDocuments(snapshot=SNAPSHOT, rank=3, names=("values",))
    )
    assert (reply, bytes(payload)) == (DocumentBytes(), b'{"values": {"loss": Infinity}}')


def test_names_that_cannot_be_stored_are_refused_before_they_are_planned() -> None:
    with pytest.raises(LayoutMismatch, match="'model' is a tensor"):
        answers_of("model", "model/w").answer_plan(read_input())


@pytest.mark.parametrize(
    "request_",
    [
        ReadPlan(attempt="a", planner=1, ranks=(3,), known=None),
        ReadTensorPlan(attempt="a", planner=1),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_share_that_another_node_plans_is_refused(request_: PlanRequest) -> None:
    answers = answers_of("model/w")
    answers.shares.begin("a")
    answers.shares.complete("a", {0: PlannedShare(digest="", plans={}, tensors=b"")})
    with pytest.raises(SnapshotUnavailable, match="planner 1 of attempt a is not on this node"):
        answers.answer_plan(request_)


def test_requests_that_wait_for_a_share_are_refused_when_the_server_ends() -> None:
    answers = answers_of("model/w")
    answers.close()
    with pytest.raises(SnapshotUnavailable, match="is over here"):
        answers.answer_plan(ReadTensorPlan(attempt="a", planner=0))


class WrongServer:
    """A server that answers everything alike."""

    def __init__(self, reply: object, payload: bytes) -> None:
        self.answer = (cast(PlanReply, reply), payload)
        self.is_closed = False

    def answer_plan(self, request: PlanRequest) -> tuple[PlanReply, bytes | bytearray]:
        return self.answer

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("reply", "payload", "reason"),
    [
        (Sealed(), b"", "at 1 answered ReadPlanInput by Sealed"),
        (PlanBytes(digest="x"), b"", "at 1 answered ReadPlanInput by PlanBytes"),
        (Unchanged(), b"", "at 1 sent a plan that cannot be read"),
        (PlanInputBytes(digest="x"), b"no JSON", "at 1 sent a plan that cannot be read"),
        (PlanInputBytes(digest="x"), b"[[]]", "at 1 sent a plan that cannot be read"),
        (PlanInputBytes(digest="x"), b'[[["w", 7]], []]', "at 1 sent a plan that cannot be read"),
    ],
)
def test_a_server_that_answers_what_was_not_asked_is_named(
    reply: object, payload: bytes, reason: str
) -> None:
    nodes = Nodes([(0,), (1, 2)], {rank: index_of([]) for rank in range(3)})
    wrong = WrongServer(reply, payload)
    exchange = PlanExchange(nodes.answers[0], lambda address: wrong)
    with pytest.raises(SnapshotUnavailable, match=reason):
        exchange.plan(nodes.task(0, "a"), lambda: False)
    assert wrong.is_closed


def test_all_holders_are_asked_once_each_beginning_with_oneself() -> None:
    asked = []

    def connect(address: str) -> PlanServer:
        asked.append(address)
        return WrongServer(Unchanged(), b"")

    holders = [RankHolder(address, ()) for address in ("a", "b", None, "c", "d")]
    servers = HolderServers(WrongServer(Unchanged(), b""), connect)
    numbers = servers.of_all(holders, lambda server: server.number, lambda: False)
    assert numbers == [2, 3, 4, 0, 1]
    assert sorted(asked) == ["a", "b", "c", "d"]
