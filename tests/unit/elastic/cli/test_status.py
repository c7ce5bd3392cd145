"""Claims about what `keepstep status` says of a job's snapshots."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.cli.status import render
from keepstep.elastic.rendezvous.records import (
    Generation,
    History,
    Member,
    Pause,
    Recovery,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import JoinedNode, View
from tests.unit.elastic.node_records import record_of


@pytest.mark.parametrize(
    ("snapshot", "line"),
    [
        (None, "last committed snapshot: none"),
        (SnapshotId(5, 2039), "last committed snapshot: step 2039\n"),
        # As of a job that goes on, and whose snapshots have ceased to be protected.
        (SnapshotId(5, 441), "last committed snapshot: step 441, 1598 steps ago"),
    ],
)
def test_steps_that_a_recovery_would_compute_again_are_reported(
    snapshot: SnapshotId | None, line: str
) -> None:
    record = record_of(nproc=1, step=2039)
    view = View(
        nodes={"a": JoinedNode(record, 1)},
        snapshot=None if snapshot is None else SnapshotCommit(snapshot),
    )
    output = io.StringIO()
    Console(file=output, width=120).print(render("job", view, 0.0))
    lines = "".join(line.rstrip() + "\n" for line in output.getvalue().splitlines())
    assert line in lines


def shown(view: View, width: int = 80) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(render("run7", view, 100.0))
    return output.getvalue()


def view_of(step: int, **changes: Any) -> View:
    record = record_of(nproc=1, step=step)
    return View(nodes={"a": JoinedNode(record, 1)}, **changes)


def test_snapshot_is_never_newer_than_the_step_that_is_reported() -> None:
    text = shown(view_of(311, snapshot=SnapshotCommit(SnapshotId(1, 314))))
    assert "step 314" in text.splitlines()[0]
    assert "steps ago" not in text


@pytest.mark.parametrize(
    ("wall_s", "age"),
    [(104.0, "4 s"), (99.0, "0 s"), (100.0 + 12 * 60, "12 min"), (100.0 + 3 * 3600, "3 h")],
    ids=["seconds", "a clock that is behind", "minutes", "hours"],
)
def test_snapshot_is_reported_with_the_time_since_it_was_reported(wall_s: float, age: str) -> None:
    view = view_of(167, snapshot=SnapshotCommit(SnapshotId(1, 155), at_s=100.0))
    output = io.StringIO()
    Console(file=output, width=80).print(render("run7", view, wall_s))
    assert f"snapshot: step 155, 12 steps ago, reported {age} ago\n" in output.getvalue()


def test_paused_job_says_since_when_and_how_to_go_on() -> None:
    text = shown(view_of(5, pause=Pause("maintenance", 50.0)))
    assert re.search(r"paused since \d\d:\d\d:\d\d, `keepstep resume run7` goes on", text)


@pytest.mark.parametrize(("every", "text"), [(1, "every step, of"), (8, "every 8 steps, of")])
def test_chosen_interval_is_reported_in_steps(every: int, text: str) -> None:
    record = record_of(nproc=1, step=5, snapshot_every=every, snapshot_cost_s=0.01)
    member = Member("a", "h", 1, 0, record.agent, record.server)
    generation = Generation(1, (member,), "h", 1, "began")
    view = View(nodes={"a": JoinedNode(record, 1)}, generation=generation)
    assert f"snapshots, chosen:    {text}" in shown(view)


def test_reason_of_a_recovery_is_whole_in_80_columns() -> None:
    reason = "no rank on node-with-a-long-name has gone on for 30 min, after step 1234"
    recovery = Recovery(2, reason, 1, 1.0, 2.0, 3.0, 4.0, 5.0, 6, 1, "peers' memory, parity")
    text = shown(view_of(7, history=History((recovery,))))
    assert reason in " ".join(text.split())
    assert "1 rank from step 6 (1 step computed again)" in " ".join(text.split())
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
