"""Claims about what counts as a failure without progress."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.failure_budget import count_failures
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Failure,
    FailureKind,
    Generation,
    Member,
    NodeRecord,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import View
from tests.unit.elastic.node_records import record_of

NODES = ("a", "b")
OLD = Generation(
    2,
    tuple(
        Member(node, "h", 1, rank, f"{node}:1", f"tcp:{node}:2") for rank, node in enumerate(NODES)
    ),
    "h",
    1,
    "start",
    failures=1,
)


def record(node: str, kind: FailureKind | None) -> NodeRecord:
    return record_of(
        node,
        nproc=1,
        generation=2,
        failure=Failure(kind, f"of {node}", 1.0) if kind is not None else None,
    )


@pytest.mark.parametrize(
    ("kinds", "count", "cause"),
    [
        ((FailureKind.PEER, FailureKind.PEER), 2, "of a"),
        ((FailureKind.PEER, None), 2, "of a"),
        # A script that is restarted explains the failures that it causes elsewhere.
        ((FailureKind.PEER, FailureKind.RESTART), 1, None),
        ((FailureKind.RESTART, FailureKind.RESTART), 1, None),
        ((FailureKind.RESTART, FailureKind.WORKER), 2, "of b"),
        ((FailureKind.RESTART, FailureKind.FATAL), 2, "of b"),
    ],
)
def test_failure_counts_unless_a_script_that_restarts_explains_it(
    kinds: tuple[FailureKind | None, ...], count: int, cause: str | None
) -> None:
    present = [record(node, kind) for node, kind in zip(NODES, kinds, strict=True)]
    counted = count_failures(View(), OLD, present, None)
    assert counted.count == count
    assert (counted.cause.message if counted.cause else None) == cause


@pytest.mark.parametrize(
    ("failures", "reached", "resumed", "count"),
    [
        (1, 6, 6, 2),
        (1, 6, 5, 2),
        # Progress: the failure is the first in a row again.
        (1, 6, 7, 1),
        (0, 6, 6, 1),
        (3, 6, 6, 4),
    ],
)
def test_failures_are_in_a_row_until_a_later_step_is_reached(
    failures: int, reached: int, resumed: int, count: int
) -> None:
    old = replace(OLD, failures=failures, reached=reached)
    present = [record("a", FailureKind.WORKER), record("b", None)]
    for view, resume in (
        (View(), SnapshotCommit(SnapshotId(2, resumed), old.members)),
        # Without memory, the job goes on from what is stored.
        (View(checkpoint=CheckpointRecord(resumed, 2, "/c", 0.0)), None),
    ):
        counted = count_failures(view, old, present, resume)
        assert (counted.count, counted.reached) == (count, resumed)


def test_node_is_blamed_as_long_as_all_failures_were_there() -> None:
    failed_on_a = [record("a", FailureKind.WORKER), record("b", FailureKind.PEER)]
    assert count_failures(View(), replace(OLD, failures=0), failed_on_a, None).node == "a"
    for before, blamed in (("a", "a"), ("b", ""), ("", "")):
        old = replace(OLD, failures=1, failing_node=before)
        assert count_failures(View(), old, failed_on_a, None).node == blamed


def test_first_failure_by_time_is_the_cause() -> None:
    early, late = (
        replace(record(node, FailureKind.WORKER), failure=Failure(FailureKind.WORKER, node, at_s))
        for node, at_s in (("b", 1.0), ("a", 2.0))
    )
    counted = count_failures(View(), OLD, [late, early], None)
    assert (counted.cause, counted.node) == (early.failure, "")
    peers = [
        replace(each, failure=replace(each.failure, kind=FailureKind.PEER))
        for each in (late, early)
        if each.failure is not None
    ]
    assert count_failures(View(), OLD, peers, None).cause == peers[1].failure


def test_broken_collectives_count_only_if_every_member_is_there_to_explain_them() -> None:
    broken = [record("a", FailureKind.PEER)]
    counted = count_failures(View(), replace(OLD, failing_node="b", last_error="E"), broken, None)
    assert (counted.count, counted.node, counted.cause, counted.error) == (1, "b", None, "E")
    of_an_older_generation = [replace(record("a", FailureKind.WORKER), generation=1)]
    assert count_failures(View(), OLD, of_an_older_generation, None).cause is None


@pytest.mark.parametrize(
    ("error", "last_error", "reached", "repeats"),
    [
        ("E at x in step 7", "E at x in step 7", 6, True),
        ("E at x in step 7", "E at x in step 8", 6, False),
        ("", "", 6, False),
        ("E before the first step", "E before the first step after step 6", 6, True),
        ("E before the first step", "E before the first step after step 5", 6, False),
    ],
)
def test_same_exception_at_the_same_step_repeats(
    error: str, last_error: str, reached: int, repeats: bool
) -> None:
    failed = record("a", FailureKind.WORKER)
    assert failed.failure is not None
    present = [replace(failed, failure=replace(failed.failure, error=error))]
    old = replace(OLD, reached=reached, last_error=last_error)
    assert count_failures(View(), old, present, None).repeats is repeats
