"""Claims about what a node does next; PROTOCOL.md has the same as a table of phases and events.

`REWRITE_CASES=1 pytest tests/unit/elastic/node` writes the table into PROTOCOL.md; read the
difference before committing it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import keepstep
from keepstep.elastic.node.state import (
    Drain,
    EndPaused,
    Enter,
    Fence,
    NodeState,
    OrderAbort,
    Workers,
    drained_on_joining,
    due_restarts,
    next_action,
)
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    Closing,
    Failure,
    FailureKind,
    Generation,
    Member,
    NodePhase,
    NodeRecord,
    Pause,
    RestartRequest,
)
from keepstep.elastic.rendezvous.view import View

PROTOCOL = Path(keepstep.__file__).parents[1] / "PROTOCOL.md"
HEADING = "| event | WAITING | STARTING, RUNNING | DRAINED | DONE |\n"

RECORD = NodeRecord("a", "h", 2, "h:1", "tcp:a", 5, 7, "d", generation=3)
MEMBER = Member("a", "h", 2, 0, "h:1", "tcp:a")
OTHER = Member("b", "h", 2, 0, "h:2", "tcp:b")
GENERATION = Generation(3, (MEMBER,), "h", 5, "start")
VIEW = View(generation=GENERATION)
CLOSING = Closing(3, "a leaves", False, 60.0)
ABORTING = Closing(3, "rank 0 failed", True, 60.0)
PAUSE = Pause("by a person", 60.0)

WORKERS = Workers(generation=3, present=True, running=True)
RUNNING = NodeState(record=RECORD, workers=WORKERS)
STATES = {
    "WAITING": replace(RUNNING, workers=Workers(generation=3)),
    "STARTING, RUNNING": RUNNING,
    "DRAINED": replace(RUNNING, drained=3),
    "DONE": replace(RUNNING, workers=replace(WORKERS, done=True)),
}

FAILURE = Failure(FailureKind.WORKER, "rank 0 failed", 60.0, 0)
STANDSTILL = replace(FAILURE, kind=FailureKind.STANDSTILL)
AWAITING = {"awaits_abort_order": True}
NEXT = replace(GENERATION, generation=4)

EVENTS = {
    "a newer generation with this node": (VIEW, NEXT, {}, {}),
    "a newer generation without it": (VIEW, replace(NEXT, members=(OTHER,)), {}, {}),
    "the newer place names another server": (
        VIEW, replace(NEXT, members=(replace(MEMBER, server="tcp:old"),)), {}, {}
    ),
    "a worker failed": (VIEW, GENERATION, {"failure": FAILURE}, {}),
    "the workers stand still": (VIEW, GENERATION, {"failure": STANDSTILL}, {}),
    "`closing`, in good order": (replace(VIEW, closing=CLOSING), GENERATION, {}, {}),
    "`closing`, abort": (replace(VIEW, closing=ABORTING), GENERATION, {}, {}),
    "`closing`, abort, which may leave garbage": (
        replace(VIEW, closing=ABORTING), GENERATION, AWAITING, {}
    ),
    "the same, fenced": (
        replace(VIEW, closing=ABORTING), GENERATION, AWAITING, {"fenced": 3}
    ),
    "the same, `abort_order`": (
        replace(VIEW, closing=ABORTING, abort_order=AbortOrder(3, True)),
        GENERATION, AWAITING, {"fenced": 3},
    ),
    "`closing` by `pause`": (replace(VIEW, closing=CLOSING, pause=PAUSE), GENERATION, {}, {}),
}  # fmt: skip

ACTIONS = {
    Enter: "enter",
    Fence: "fence the server",
    OrderAbort: "tell the workers to abort",
    EndPaused: "end the workers",
}


def next_of(event: str, phase: str) -> object:
    view, generation, workers, record = EVENTS[event]
    state = STATES[phase]
    state = replace(
        state,
        workers=replace(state.workers, **workers),  # type: ignore[arg-type]
        record=replace(state.record, **record),  # type: ignore[arg-type]
    )
    return next_action(state, replace(view, generation=generation))


def described(action: object) -> str:
    if action is None:
        return "-"
    if isinstance(action, Drain):
        return "drain by abort" if action.abort else "drain in good order"
    return ACTIONS[type(action)]


def table() -> str:
    """Return the table of what a node does next, by phase and event."""
    rows = [HEADING, "|---|---|---|---|---|\n"]
    for event in EVENTS:
        cells = [event, *(described(next_of(event, phase)) for phase in STATES)]
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def test_protocol_has_the_table_of_phases_and_events() -> None:
    text = PROTOCOL.read_text()
    start = text.index(HEADING)
    end = text.index("\n\n", start) + 1
    if os.environ.get("REWRITE_CASES"):
        PROTOCOL.write_text(text[:start] + table() + text[end:])
        return
    assert text[start:end] == table()


@pytest.mark.parametrize("phase", STATES)
def test_states_of_the_table_have_their_phases(phase: str) -> None:
    assert STATES[phase].phase.name in phase.split(", ")


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (replace(RUNNING, workers=Workers()), NodePhase.WAITING),
        (replace(RUNNING, workers=Workers(), drained=3), NodePhase.DRAINED),
        (replace(STATES["WAITING"], paused=3), NodePhase.DRAINED),
        (replace(STATES["WAITING"], paused=2), NodePhase.WAITING),
        (replace(RUNNING, workers=replace(WORKERS, running=False)), NodePhase.STARTING),
        (replace(STATES["DONE"], drained=3), NodePhase.DONE),
        (
            replace(RUNNING, workers=replace(WORKERS, done=True, failure=FAILURE)),
            NodePhase.RUNNING,
        ),
    ],
)
def test_a_nodes_phase_is_of_the_newest_generation_that_it_entered(
    state: NodeState, phase: NodePhase
) -> None:
    assert state.phase is phase


def test_a_node_enters_what_is_newer_and_goes_back_to_nothing() -> None:
    later = replace(VIEW, generation=NEXT)
    assert next_action(RUNNING, later) == Enter(NEXT)
    assert next_action(replace(RUNNING, drained=4), later) is None
    assert next_action(replace(RUNNING, drained=5), later) is None
    assert next_action(RUNNING, replace(VIEW, generation=None)) is None
    # A mirror that lags behind shows the end of a generation that the workers have left.
    older = replace(
        VIEW, generation=replace(GENERATION, generation=2), closing=replace(CLOSING, generation=2)
    )
    assert next_action(RUNNING, older) is None
    assert next_action(replace(RUNNING, workers=Workers(), drained=3), older) is None


def test_nobody_aborts_before_the_server_is_fenced_and_the_leader_has_ordered_it() -> None:
    view = replace(VIEW, closing=ABORTING, abort_order=AbortOrder(3, True))
    waiting = replace(RUNNING, workers=replace(WORKERS, awaits_abort_order=True))
    assert next_action(waiting, view) == Fence(3)
    fenced = replace(waiting, record=replace(RECORD, fenced=3))
    assert next_action(fenced, replace(view, abort_order=None)) == Drain(3, abort=True)
    assert next_action(fenced, replace(view, abort_order=AbortOrder(2, True))) == Drain(3, True)
    assert next_action(fenced, view) == OrderAbort(3)
    assert next_action(replace(fenced, ordered=3), view) == Drain(3, abort=True)
    assert next_action(waiting, replace(VIEW, closing=CLOSING)) == Drain(3, abort=False)


def test_an_end_in_good_order_becomes_an_abort_once_a_worker_fails() -> None:
    view = replace(VIEW, closing=CLOSING)
    assert next_action(RUNNING, view) == Drain(3, abort=False)
    failed = replace(RUNNING, workers=replace(WORKERS, failure=FAILURE))
    assert next_action(failed, view) == Drain(3, abort=True)


def test_workers_of_a_paused_job_end_once_and_not_before_they_have_drained() -> None:
    view = replace(VIEW, closing=CLOSING, pause=PAUSE)
    assert next_action(RUNNING, view) == Drain(3, abort=False)
    drained = replace(RUNNING, drained=3)
    assert next_action(drained, view) == EndPaused(3)
    assert next_action(drained, replace(view, pause=None)) is None
    done = replace(drained, workers=replace(WORKERS, done=True))
    assert next_action(done, view) is None
    ended = replace(drained, paused=3, workers=replace(WORKERS, present=False))
    assert next_action(ended, view) is None
    assert ended.phase is NodePhase.DRAINED


def test_no_announcement_is_believed_of_a_generation_that_is_fenced_drained_or_done() -> None:
    assert RUNNING.ended == 0
    assert replace(RUNNING, record=replace(RECORD, fenced=3)).ended == 3
    assert replace(RUNNING, drained=2).ended == 2
    assert replace(RUNNING, record=replace(RECORD, phase=NodePhase.DONE)).ended == 3


def test_workers_are_restarted_only_once_the_leader_closes_for_them() -> None:
    request = RestartRequest(3, 1, "by a person")
    view = replace(VIEW, restarts={1: request})
    assert due_restarts(RUNNING, view) == ()
    closing = replace(view, closing=CLOSING)
    assert due_restarts(RUNNING, closing) == (request,)
    assert due_restarts(replace(RUNNING, record=replace(RECORD, server="tcp:new")), closing) == ()
    ahead = replace(closing, generation=NEXT, closing=replace(CLOSING, generation=4))
    assert due_restarts(RUNNING, ahead) == ()


def test_node_that_joins_again_takes_no_generation_for_open_that_its_workers_have_left() -> None:
    """A job that was restored from another node's view may be two generations behind it."""
    behind = replace(RECORD, generation=1, phase=NodePhase.DRAINED)
    state = NodeState(record=behind, workers=Workers(generation=3), drained=3)
    assert drained_on_joining(state) == 3
    ahead = replace(RECORD, generation=5, phase=NodePhase.DRAINED)
    assert drained_on_joining(replace(state, record=ahead)) == 5
    waiting = replace(RECORD, generation=0, phase=NodePhase.WAITING)
    assert drained_on_joining(NodeState(record=waiting)) == 0


def test_node_that_begins_has_entered_ordered_and_paused_nothing() -> None:
    begun = NodeState(record=replace(RECORD, generation=0))
    assert (begun.drained, begun.ordered, begun.paused) == (0, 0, 0)
    assert begun.workers == Workers(
        generation=0, present=False, done=False, running=False, failure=None,
        awaits_abort_order=False,
    )  # fmt: skip
    assert begun.phase is NodePhase.WAITING
    assert next_action(begun, VIEW) == Enter(GENERATION)
