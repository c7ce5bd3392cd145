"""Claims about what counts as a failure without progress."""

from __future__ import annotations

import pytest

from keepstep.elastic.rendezvous.failure_budget import count_failures
from keepstep.elastic.rendezvous.records import (
    Failure,
    FailureKind,
    Generation,
    Member,
    NodeRecord,
)
from keepstep.elastic.rendezvous.view import View

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
    return NodeRecord(
        node=node,
        host="h",
        nproc=1,
        agent=f"{node}:1",
        server=f"tcp:{node}:2",
        store_port=5,
        lease=7,
        digest="d",
        generation=2,
        failure=Failure(kind, f"of {node}", 1.0) if kind is not None else None,
    )


@pytest.mark.parametrize(
    ("kinds", "count", "cause"),
    [
        ((FailureKind.PEER, FailureKind.PEER), 2, "of a"),
        ((FailureKind.PEER, None), 2, "of a"),
        # What a script that begins anew breaks elsewhere is explained by it.
        ((FailureKind.PEER, FailureKind.RESTART), 1, None),
        ((FailureKind.RESTART, FailureKind.RESTART), 1, None),
        ((FailureKind.RESTART, FailureKind.WORKER), 2, "of b"),
        ((FailureKind.RESTART, FailureKind.FATAL), 2, "of b"),
    ],
)
def test_failure_counts_unless_a_script_that_begins_anew_explains_it(
    kinds: tuple[FailureKind | None, ...], count: int, cause: str | None
) -> None:
    present = [record(node, kind) for node, kind in zip(NODES, kinds, strict=True)]
    counted = count_failures(View(), OLD, present, None)
    assert counted.count == count
    assert (counted.cause.message if counted.cause else None) == cause
