"""Claims about what a snapshot server has for others to plan with, and believes of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import msgpack

from keepstep.checkpoint.errors import LayoutMismatch, SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import PersistTask, RankHolder, ReadPlan
from keepstep.checkpoint.snapshot.server import plan_exchange
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from tests.unit.checkpoint.snapshot.server.plan_nodes import Indexes, Nodes, exchange_of, index_of


def boxes(by_rank: list[Any], digests: list[Any]) -> bytes:
    return msgpack.encode({"boxes": by_rank, "digests": digests})


BOXES = ReadPlan(attempt="a", stage="boxes", holder=1)


def test_messages_stay_after_a_failure_and_what_is_lacking_is_refused() -> None:
    outbox = PlanOutbox()
    outbox.begin("a")
    outbox.post("a", "boxes", {1: b"[]"})
    outbox.fail("a", LayoutMismatch("model/w"))
    assert outbox.read_plan(BOXES) == b"[]"
    with pytest.raises(SnapshotUnavailable, match="not planned: LayoutMismatch: model/w"):
        outbox.read_plan(ReadPlan(attempt="a", stage="chunks", holder=1))


def test_an_attempt_that_is_tried_again_does_not_fail_by_what_was_before() -> None:
    outbox = PlanOutbox()
    outbox.begin("a")
    outbox.fail("a", LayoutMismatch("model/w"))
    outbox.begin("a")
    outbox.post("a", "boxes", {1: b"[]"})
    assert outbox.read_plan(BOXES) == b"[]"


def test_what_an_older_attempt_still_has_is_not_taken_for_the_newest_ones() -> None:
    outbox = PlanOutbox()
    outbox.begin("a")
    outbox.begin("b")
    outbox.post("b", "boxes", {1: b"[1]"})
    outbox.post("a", "boxes", {1: b"[2]"})
    outbox.fail("a", LayoutMismatch("model/w"))
    assert outbox.read_plan(ReadPlan(attempt="b", stage="boxes", holder=1)) == b"[1]"


def test_a_holder_that_others_do_not_know_is_refused() -> None:
    outbox = PlanOutbox()
    outbox.begin("a")
    outbox.post("a", "boxes", {0: b"[]"})
    with pytest.raises(SnapshotUnavailable, match="has no boxes for holder 1; the nodes do not"):
        outbox.read_plan(BOXES)


def test_requests_that_wait_are_refused_when_the_server_ends() -> None:
    outbox = PlanOutbox()
    outbox.close()
    with pytest.raises(SnapshotUnavailable, match="is over here"):
        outbox.read_plan(BOXES)


def test_shards_that_cannot_be_stored_or_are_not_held_fail_before_anything_is_sent() -> None:
    entries = [
        Entry(
            key=key,
            dtype="uint8",
            global_shape=(4,),
            box=Box.whole((4,)),
            byte_offset=0,
            nbytes=4,
        )
        for key in ("model", "model/w")
    ]
    nodes = Nodes([(0,), (1,)], {0: index_of(entries), 1: index_of([])})
    with pytest.raises(LayoutMismatch, match="'model' is a tensor"):
        nodes.plan_one(0, "a")
    del nodes.held[1].by_rank[1]
    with pytest.raises(SnapshotUnavailable, match="rank 1"):
        nodes.plan_one(1, "a")


class WrongServer:
    """A server that answers everything alike."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.is_closed = False

    def read_plan(self, request: ReadPlan) -> bytes | None:
        return self.message

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    "message",
    [
        b"no plan",
        msgpack.encode([]),
        boxes([[[]]], [{}]),
        boxes([[["w"]], [[]]], [{}, {}]),
        boxes([[[]], [[], []]], [{}, {}]),
        boxes([[[]], [[]]], [{}]),
    ],
)
def test_a_server_that_sends_what_cannot_be_read_is_named(message: bytes) -> None:
    outbox = PlanOutbox()
    nodes = Nodes([(0,), (1, 2)], {rank: index_of([]) for rank in range(3)})
    wrong = WrongServer(message)
    outbox.begin("a")
    exchange = exchange_of(Indexes({0: index_of([])}), outbox, lambda address: wrong)
    with pytest.raises(SnapshotUnavailable, match="at 1 sent a plan that cannot be read"):
        exchange.plan(nodes.task(0, "a"), lambda: False)
    assert wrong.is_closed


def test_all_holders_are_asked_once_each_beginning_with_oneself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_exchange, "_PARALLEL_SERVERS", 1)
    content = msgpack.encode({"tensors": [], "documents": b"[]"})
    asked = []

    def connect(address: str) -> WrongServer:
        asked.append(address)
        return WrongServer(content)

    own = PlanOutbox()
    own.begin("a")
    own.post("a", "content", {None: content})
    holders = tuple(RankHolder(address, ()) for address in ("a", "b", None, "c", "d"))
    task = PersistTask("memory://", SnapshotId(1, 1), 1, "a", holders)
    assert exchange_of(Indexes({}), own, connect).content(task, lambda: False).tensors == {}
    assert asked == ["c", "d", "a", "b"]
