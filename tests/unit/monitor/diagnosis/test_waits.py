"""Tests which ranks count as waiting for others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, diagnose
from keepstep.monitor.diagnosis.tables import FRONTIER
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.diagnosis.waits import waiting_ranks
from keepstep.monitor.records import Communicator
from tests.unit.monitor.diagnosis.trace_text import parse

JOB = """
node a: 0 1 2
communicator world: 0 1 2
communicator pair: 1 2
step 1 at 0.0
"""


def waiting(rows: str) -> frozenset[int]:
    trace = parse(JOB + rows)
    job = trace.job(9.0)
    state, _ = diagnose(job, {}, NO_DIAGNOSIS_STATE, 9.0, Thresholds())
    return waiting_ranks(state.frontiers, job.communicators)


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ("world all_reduce 4k async  .        1.0-?    1.0-?", {1, 2}),
        ("world all_reduce 4k async  1.0-?    1.0-?    1.0-?", set()),
        ("world all_reduce 4k        1.0-?    1.0-?    1.0-?", {0, 1, 2}),
        # Its device does other work first: rank 0 has called the operation and not begun it.
        ("world all_reduce 4k async  1.0+?-?  1.0+1.1-?  1.0+1.1-?", {1, 2}),
        # Rank 0 has begun and left it.
        ("world all_reduce 4k async  1.0-2.0  1.0-?    1.0-?", set()),
        # Rank 1 is needed by rank 0, and by nobody in the pair.
        ("pair all_reduce 4k async   .        1.0-?    1.0-?\n"
         "world all_reduce 4k async  1.0-?    .        1.0-?", {0, 2}),
        ("world receive 4k <-0 async .        1.0-?    .", {1}),
        ("world receive 4k <-0 async .        1.0-?    .\n"
         "world send 4k ->1 async    1.0-?    .        .", set()),
        ("world send 4k ->2 async    .        1.0-?    .", {1}),
        ("world send 4k ->2 async    .        1.0-?    .\n"
         "world receive 4k <-0 async .        .        1.0-?", {1, 2}),
    ],
)  # fmt: skip
def test_rank_waits_in_an_asynchronous_operation_until_all_members_have_begun_it(
    rows: str, ranks: set[int]
) -> None:
    assert waiting(rows) == ranks


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_rank_that_has_begun_the_fewest_operations_is_not_waiting_and_those_ahead_are(
    counts: list[tuple[int, int]],
) -> None:
    frontiers = np.zeros(len(counts), FRONTIER)
    frontiers["rank"], frontiers["communicator"] = np.arange(len(counts)), 1
    frontiers["peer"], frontiers["asynchronous"] = -1, True
    ended, unended = np.array(counts).T
    fewest = (ended + unended).min()
    # Nobody ends an operation before all have begun it.
    frontiers["ended"] = np.minimum(ended, fewest)
    frontiers["began"] = frontiers["entered"] = ended + unended
    is_open = frontiers["began"] > frontiers["ended"]
    frontiers["open"] = np.where(is_open, frontiers["ended"] + 1, 0)
    group = Communicator(1, "world", tuple(range(len(counts))))
    expected = np.flatnonzero(is_open & (frontiers["ended"] == fewest))
    assert waiting_ranks(frontiers, {1: group}) == set(expected.tolist())
    # A member of which nothing is known has begun nothing.
    larger = Communicator(1, "world", tuple(range(len(counts) + 1)))
    assert waiting_ranks(frontiers, {1: larger}) == set(np.flatnonzero(is_open).tolist())
