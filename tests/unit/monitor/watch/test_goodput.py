"""Claims about goodput: every second of a job is accounted for once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.contracts import RecoveryStatus
from keepstep.monitor.watch.goodput import (
    CONNECTING,
    DETECTING,
    FIRST,
    KEPT,
    REDONE,
    RESTORING,
    goodput,
)


def recovery(at_s: float, lost: int = 2, *phases_s: float) -> RecoveryStatus:
    opened, ready, restored, stepped = (
        at_s + after for after in (phases_s or (0.1, 0.3, 0.7, 1.2))
    )
    return RecoveryStatus(
        2, "a node died", 4, at_s, opened, ready, restored, stepped, 10, lost, "memory"
    )


def test_undisturbed_job_keeps_all_its_time() -> None:
    account = goodput((), 100.0, 160.0, 0.5)
    assert account.share == 1.0
    assert account.parts[KEPT] == 60.0


def test_recovery_is_split_into_its_phases() -> None:
    account = goodput([recovery(120.0)], 100.0, 160.0, 0.5)
    assert account.parts == pytest.approx(
        {DETECTING: 0.1, CONNECTING: 0.2, RESTORING: 0.4, FIRST: 0.0, REDONE: 1.0, KEPT: 58.3}
    )


def test_unfinished_recovery_lasts_until_now() -> None:
    underway = RecoveryStatus(2, "a node died", 4, 150.0, 150.5, 0.0, 0.0, 0.0, 10, 0, "")
    account = goodput([underway], 100.0, 160.0, 0.5)
    assert account.parts[CONNECTING] == pytest.approx(9.5)
    assert account.parts[RESTORING] == 0.0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 50), st.integers(0, 9), st.lists(st.floats(0, 30), min_size=4, max_size=4)
        ),
        max_size=6,
    ),
    st.floats(0, 200),
    st.one_of(st.none(), st.floats(0.01, 20)),
)
def test_parts_are_never_negative_and_add_up(
    troubles: list[tuple[float, int, list[float]]], wall_s: float, step_s: float | None
) -> None:
    at_s, recoveries = 1000.0, []
    for gap_s, lost, phases_s in troubles:
        at_s += gap_s
        recoveries.append(recovery(at_s, lost, *sorted(phases_s)))
    account = goodput(recoveries, 1000.0, 1000.0 + wall_s, step_s)
    assert all(seconds >= 0 for seconds in account.parts.values())
    assert sum(account.parts.values()) == pytest.approx(wall_s, abs=1e-6)
    assert 0 <= account.share <= 1 + 1e-9
