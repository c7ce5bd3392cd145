import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.elastic.rendezvous.intervals import (
    PRIOR_NODE_S,
    best_interval_s,
    failures_per_s,
    snapshot_every,
)
from keepstep.elastic.rendezvous.records import Recovery
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval

DAY_S = 86400.0


def recovery(at_s: float, after_failure: bool) -> Recovery:
    return Recovery(1, "", 8, at_s, at_s, at_s, at_s, at_s, 0, 0, "memory", after_failure)


def lost_share(interval_s: float, cost_s: float, apart_s: float) -> float:
    """Wall time per useful time, less one, with Poisson failures (Daly 2006, equation 20)."""
    useful_s = interval_s - cost_s
    return apart_s * (math.exp(interval_s / apart_s) - 1) / useful_s - 1


@given(st.floats(1e-3, 1e3), st.floats(1e3, 1e7))
def test_no_other_interval_loses_notably_less(cost_s: float, apart_s: float) -> None:
    best_s = best_interval_s(cost_s, 1 / apart_s)
    mine = lost_share(best_s, cost_s, apart_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        if best_s * factor > cost_s * 1.01:
            assert mine <= lost_share(best_s * factor, cost_s, apart_s) * 1.02


def test_it_is_youngs_where_costs_are_small() -> None:
    assert best_interval_s(1.0, 1 / 1e8) == pytest.approx(math.sqrt(2e8), rel=1e-3)


def test_a_new_job_expects_what_others_have_seen() -> None:
    assert failures_per_s([], 100, 0.0) == pytest.approx(100 / PRIOR_NODE_S)
    assert 2.3 <= failures_per_s([], 1000, 0.0) * DAY_S <= 6.5


def test_what_it_sees_itself_outweighs_that_in_time() -> None:
    start = recovery(0.0, True)
    failing = [start, *(recovery(day * DAY_S, True) for day in range(1, 11))]
    joining = [start, *(recovery(day * DAY_S, False) for day in range(1, 11))]
    assert failures_per_s(failing, 1000, 10 * DAY_S) * DAY_S == pytest.approx(11 / 10.25)
    assert failures_per_s(joining, 1000, 10 * DAY_S) * DAY_S == pytest.approx(1 / 10.25)


def test_snapshots_that_cost_nothing_are_taken_at_every_step() -> None:
    assert snapshot_every(1e-9, 0.5, 1e-4) == 1
    assert snapshot_every(0.01, 0.5, 1 / DAY_S) == pytest.approx(
        math.sqrt(2 * 0.01 * DAY_S) / 0.5, abs=1
    )


def measured(cost_s: float, every: int = 0) -> SnapshotInterval:
    interval = SnapshotInterval(every, 1 / DAY_S)
    for step in range(20):
        interval.note_step(step * 0.5)
        interval.note_snapshot(cost_s)
    return interval


def test_a_pace_that_was_given_is_kept() -> None:
    interval = measured(0.01, every=4)
    assert [step for step in range(1, 10) if interval.is_wanted(step, 0)] == [4, 8]
    assert interval.notable_change() is None


def test_a_pace_of_its_own_is_measured_first() -> None:
    assert all(SnapshotInterval(0, 1 / DAY_S).is_wanted(step, step - 1) for step in range(1, 9))
    interval = measured(0.01)
    assert interval.every == snapshot_every(0.01, 0.5, 1 / DAY_S) > 50
    assert not interval.is_wanted(interval.every, 1)
    assert interval.is_wanted(interval.every + 1, 1)


def test_only_a_notable_change_of_pace_is_reported() -> None:
    interval = measured(0.01)
    assert interval.notable_change() == (interval.every, 0.01)
    assert interval.notable_change() is None
    for _ in range(32):
        interval.note_snapshot(0.011)
    assert interval.notable_change() is None
    for _ in range(32):
        interval.note_snapshot(0.1)
    assert interval.notable_change() == (interval.every, 0.1)
