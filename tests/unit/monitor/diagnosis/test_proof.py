"""Tests what proves a hang, and when people are alerted."""

from dataclasses import replace

import pytest

from keepstep.monitor.diagnosis.pauses import PauseKind
from keepstep.monitor.diagnosis.proof import Pause, describe_process, is_proved, needs_alert
from keepstep.monitor.diagnosis.thresholds import HangThresholds

HANG = Pause(
    kind=PauseKind.STEP, idle_s=31.0, patience_s=2.4, learnt_s=0.0, quiet_s=30.0, stopped=False
)
LIMITS = HangThresholds()


def test_quiet_process_that_stood_still_for_long_is_proved_to_hang() -> None:
    assert is_proved(HANG, 0.5, LIMITS)


@pytest.mark.parametrize(
    "pause",
    [
        pytest.param(replace(HANG, idle_s=29.0), id="too short by the clock"),
        pytest.param(replace(HANG, patience_s=16.0), id="too short for its phase"),
        pytest.param(replace(HANG, learnt_s=11.0), id="a third of it was normal before"),
        pytest.param(replace(HANG, quiet_s=29.0), id="its process did something"),
        pytest.param(replace(HANG, quiet_s=None), id="its process is not known"),
        pytest.param(replace(HANG, kind=PauseKind.DATA, idle_s=1e6), id="waits for data"),
        pytest.param(replace(HANG, kind=PauseKind.CHECKPOINT, idle_s=1e6), id="saves"),
        pytest.param(replace(HANG, kind=PauseKind.BETWEEN_STEPS, idle_s=599.0), id="user code"),
        pytest.param(replace(HANG, kind=PauseKind.EVALUATION, idle_s=599.0), id="evaluates"),
    ],
)
def test_each_condition_is_needed(pause: Pause) -> None:
    assert not is_proved(pause, 0.5, LIMITS)


def test_ten_steps_are_needed() -> None:
    assert not is_proved(replace(HANG, idle_s=119.0), 12.0, LIMITS)
    assert is_proved(replace(HANG, idle_s=121.0), 12.0, LIMITS)


def test_stopped_process_is_proved_in_any_phase() -> None:
    for kind in PauseKind:
        assert is_proved(replace(HANG, kind=kind, stopped=True), 0.5, LIMITS)


def test_people_are_alerted_later_where_the_process_is_busy_or_such_pauses_are_usual() -> None:
    assert needs_alert(replace(HANG, idle_s=15.0), LIMITS)
    assert not needs_alert(replace(HANG, idle_s=14.0), LIMITS)
    assert not needs_alert(replace(HANG, idle_s=119.0, quiet_s=0.0), LIMITS)
    assert needs_alert(replace(HANG, idle_s=120.0, quiet_s=0.0), LIMITS)
    assert not needs_alert(replace(HANG, idle_s=59.0, learnt_s=30.0), LIMITS)
    assert needs_alert(replace(HANG, idle_s=1.0, stopped=True), LIMITS)


def test_what_is_known_of_the_process_is_said() -> None:
    assert "30 s" in describe_process(HANG)
    assert "busy" in describe_process(replace(HANG, quiet_s=0.0))
    assert "not known" in describe_process(replace(HANG, quiet_s=None))
    assert "stopped" in describe_process(replace(HANG, quiet_s=0.0, stopped=True))
