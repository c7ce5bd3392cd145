"""Claims about what `keepstep status` says of a job's snapshots."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.cli.status import render
from keepstep.elastic.rendezvous.records import NodeRecord, SnapshotCommit
from keepstep.elastic.rendezvous.view import JoinedNode, View


@pytest.mark.parametrize(
    ("snapshot", "told"),
    [
        (None, "last committed snapshot: none"),
        (SnapshotId(5, 2039), "last committed snapshot: step 2039\n"),
        # As of a job that goes on, and whose snapshots have ceased to be protected.
        (SnapshotId(5, 441), "last committed snapshot: step 441, 1598 steps ago"),
    ],
)
def test_steps_that_a_recovery_would_compute_again_are_told(
    snapshot: SnapshotId | None, told: str
) -> None:
    record = NodeRecord("a", "h", 1, "h:1", "tcp:h:2", 1, 1, "digest", step=2039)
    view = View(
        nodes={"a": JoinedNode(record, 1)},
        snapshot=None if snapshot is None else SnapshotCommit(snapshot),
    )
    output = io.StringIO()
    Console(file=output, width=120).print(render("job", view, 0.0))
    lines = "".join(line.rstrip() + "\n" for line in output.getvalue().splitlines())
    assert told in lines
