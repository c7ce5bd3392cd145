"""Every syndrome on a small trace that a person can read: `cases/*.txt`."""

from pathlib import Path

import pytest

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, DiagnosisState, diagnose
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.verdicts import Verdict
from tests.unit.monitor.diagnosis.trace_text import Recording, Trace, load

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))


def watch(trace: Trace, every_s: float) -> tuple[DiagnosisState, tuple[Verdict, ...]]:
    """Read the rings every so often, as a daemon does: each time the last few seconds only."""
    past, verdicts, now_s, recording = NO_DIAGNOSIS_STATE, (), every_s, Recording(trace)
    while now_s < trace.read_s + every_s:
        at_s = min(now_s, trace.read_s)
        dead, trace.dead = trace.dead, trace.dead if at_s == trace.read_s else set()
        past, verdicts = diagnose(recording.job(at_s, at_s - 4.0), {}, past, at_s, Thresholds())
        trace.dead = dead
        now_s += every_s
    return past, verdicts


def summarize(verdicts: tuple[Verdict, ...]) -> list[str]:
    return sorted(f"{verdict.syndrome}: {verdict.subject}" for verdict in verdicts)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_has_exactly_its_verdicts_in_one_reading(path: Path) -> None:
    trace = load(path)
    _, verdicts = diagnose(trace.job(), {}, NO_DIAGNOSIS_STATE, trace.read_s, Thresholds())
    assert summarize(verdicts) == sorted(trace.expected)
    assert all(verdict.evidence for verdict in verdicts)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_has_exactly_its_verdicts_in_overlapping_readings(path: Path) -> None:
    trace = load(path)
    _, verdicts = watch(trace, 0.5)
    assert summarize(verdicts) == sorted(trace.expected)
