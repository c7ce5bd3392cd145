"""Claims about the ends of a torchrun agent's waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.elastic.rendezvous.records import (
    Closing,
    Eviction,
    Generation,
    Member,
    Pause,
    Result,
)
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.torchrun.rounds import awaits_nodes, closed, result_of, timed_out

MEMBERS = (Member("a", "h", 1, 0, "h:1", "h:2"), Member("b", "h", 1, 1, "h:3", "h:4"))
OPEN = View(revision=9, generation=Generation(3, MEMBERS, "h", 5, "start"))
CLOSING = replace(OPEN, closing=Closing(3, "lost a", True, 1.0))


@pytest.mark.parametrize("view", [View(), CLOSING])
def test_node_that_has_waited_for_others_says_what_to_do(view: View) -> None:
    assert awaits_nodes(view)
    found = timed_out(view, 60.0).reason
    assert found.startswith("no round within 60 s: ")
    assert "start more nodes" in found
    assert ("the last round" in found) == (view is CLOSING)


@pytest.mark.parametrize("view", [OPEN, replace(CLOSING, pause=Pause("maintenance", 1.0))])
def test_open_rounds_and_pauses_are_waited_for_without_limit(view: View) -> None:
    assert not awaits_nodes(view)


def test_job_that_has_ended_and_a_node_that_was_evicted_are_closed() -> None:
    ended = replace(OPEN, result=Result(True, "the workers on a have finished"))
    evicted = replace(OPEN, evictions={"b": Eviction("slow disk", may_return=False)})
    for view, reason in ((ended, "the workers on a have finished"), (evicted, "slow disk")):
        found = closed(view, "b")
        assert found is not None
        assert reason in found.reason
    assert closed(evicted, "a") is None


def test_result_names_what_has_ended_an_agent() -> None:
    failed = result_of("a", RuntimeError("no memory"))
    assert (failed.succeeded, "RuntimeError" in failed.message) == (False, True)
    assert result_of("a", None).succeeded
