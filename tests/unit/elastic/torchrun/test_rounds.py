"""Claims about what a torchrun agent does in the job's rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.elastic.rendezvous.records import (
    Closing,
    Eviction,
    FailureKind,
    Generation,
    Member,
    NodePhase,
    NodeRecord,
    Pause,
    Result,
)
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.torchrun.rounds import (
    Closed,
    Enter,
    TimedOut,
    Wait,
    changes_at_end,
    next_step,
    nodes_waiting,
    result_of,
)

RECORD = NodeRecord(
    node="b", host="h", nproc=1, agent="h:3", server="torchrun:b", store_port=7, lease=2,
    digest="d", warm=True,
)  # fmt: skip
RUNNING = replace(RECORD, generation=3, phase=NodePhase.RUNNING)
MEMBERS = (
    Member("a", "h", 1, 0, "h:1", "torchrun:a"),
    Member("b", "h", 1, 1, "h:3", "torchrun:b"),
)
OPEN = View(revision=9, generation=Generation(3, MEMBERS, "h", 5, "start"))
CLOSING = replace(OPEN, closing=Closing(3, "lost a", True, 1.0))
LIMIT_S = 60.0


def test_node_enters_a_generation_that_it_has_not_left() -> None:
    for earlier in (RECORD, replace(RUNNING, generation=2, phase=NodePhase.DRAINED)):
        step = next_step(OPEN, earlier, 0.0, LIMIT_S)
        assert step == Enter(OPEN.generation, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "record",
    [
        replace(RUNNING, phase=NodePhase.DRAINED),
        replace(RECORD, node="c"),
        replace(RECORD, server="torchrun:another process of the same name"),
    ],
)
def test_node_without_a_place_in_the_open_generation_waits_for_the_next_for_ever(
    record: NodeRecord,
) -> None:
    assert next_step(OPEN, record, 2 * LIMIT_S, LIMIT_S) == Wait(None)


@pytest.mark.parametrize("view", [View(), CLOSING])
def test_node_waits_so_long_for_others_and_says_then_what_to_do(view: View) -> None:
    assert next_step(view, RECORD, 20.0, LIMIT_S) == Wait(40.0)
    step = next_step(view, RECORD, LIMIT_S, LIMIT_S)
    assert isinstance(step, TimedOut)
    assert "no round within 60 s" in step.reason
    assert "start more nodes" in step.reason


def test_pause_is_waited_for_without_limit() -> None:
    paused = replace(CLOSING, pause=Pause("maintenance", 1.0))
    assert next_step(paused, RECORD, 2 * LIMIT_S, LIMIT_S) == Wait(None)


def test_job_that_has_ended_and_a_node_that_was_evicted_are_closed() -> None:
    ended = replace(OPEN, result=Result(True, "the workers on a have finished"))
    evicted = replace(OPEN, evictions={"b": Eviction("slow disk", may_return=False)})
    for view, reason in ((ended, "the workers on a have finished"), (evicted, "slow disk")):
        step = next_step(view, RECORD, 0.0, LIMIT_S)
        assert isinstance(step, Closed)
        assert reason in step.reason


def test_workers_that_end_by_themselves_are_the_reason_of_the_next_round() -> None:
    changes = changes_at_end(OPEN, RUNNING, 5.0)
    assert changes["phase"] is NodePhase.DRAINED
    assert changes["failure"].kind is FailureKind.RESTART
    assert changes["failure"].message == "workers on b have failed"


@pytest.mark.parametrize("number", [3, 4])
def test_workers_that_end_because_the_generation_does_are_no_failure(number: int) -> None:
    assert OPEN.generation is not None
    view = (
        CLOSING if number == 3 else replace(OPEN, generation=replace(OPEN.generation, generation=4))
    )
    assert changes_at_end(view, RUNNING, 5.0) == {"phase": NodePhase.DRAINED, "failure": None}


def test_node_without_workers_changes_nothing() -> None:
    assert changes_at_end(OPEN, RECORD, 5.0) == {}
    assert changes_at_end(OPEN, replace(RUNNING, phase=NodePhase.DRAINED), 5.0) == {}


def test_workers_go_on_while_their_generation_is_open() -> None:
    assert nodes_waiting(OPEN, 3) == 0
    assert nodes_waiting(CLOSING, 3) == 1
    assert nodes_waiting(OPEN, 2) == 1


def test_success_on_one_node_stops_no_workers_and_failure_all_of_them() -> None:
    failed = result_of("a", RuntimeError("no memory"))
    assert (failed.succeeded, "RuntimeError" in failed.message) == (False, True)
    assert result_of("a", None).succeeded
    assert nodes_waiting(replace(CLOSING, result=result_of("a", None)), 3) == 0
    assert nodes_waiting(replace(OPEN, result=failed), 3) == 1
