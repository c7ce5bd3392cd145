"""Claims about when a node's workers are taken to have reached a phase."""

from __future__ import annotations

from keepstep.elastic.agent.phase_reports import PhaseReports
from keepstep.elastic.worker.messages import Ready, Restored, Stepped


def test_phase_counts_once_the_last_worker_has_reached_it() -> None:
    phases = PhaseReports()
    assert phases.times(0) == {}
    phases.add(0, Ready(generation=1, at_s=10.0))
    assert phases.times(2) == {}
    phases.add(1, Ready(generation=1, at_s=12.0))
    phases.add(1, Restored(generation=1, at_s=13.0, source="memory", step=7))
    assert phases.times(2) == {"ready": 12.0}
    phases.add(0, Restored(generation=1, at_s=14.0, source="memory, parity", step=7))
    assert phases.times(2) == {"ready": 12.0, "restored": 14.0, "resumed_step": 7}
    phases.add(0, Stepped(generation=1, at_s=15.0))
    phases.add(1, Stepped(generation=1, at_s=16.0))
    assert phases.times(2) == {
        "ready": 12.0,
        "restored": 14.0,
        "stepped": 16.0,
        "resumed_step": 7,
    }


def test_sources_of_all_workers_are_named_once() -> None:
    phases = PhaseReports()
    assert phases.restored_from == ""
    phases.add(0, Restored(generation=1, at_s=0.0, source="parity, memory", step=7))
    phases.add(1, Restored(generation=1, at_s=0.0, source="memory", step=7))
    assert phases.restored_from == "memory, parity"


def test_worker_has_stepped_once_it_reports_so() -> None:
    phases = PhaseReports()
    phases.add(1, Stepped(generation=1, at_s=1.0))
    assert phases.has_stepped(1)
    assert not phases.has_stepped(0)
