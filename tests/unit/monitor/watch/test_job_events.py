"""Claims about the log of events: each is in it once, with its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keepstep.monitor.contracts import JobStatus, MemberStatus
from keepstep.monitor.watch.job_events import JobEvent, status_events

NOW_S = 9000.0
A, B = (MemberStatus(node, "running", (rank,), 5, 0) for rank, node in enumerate("ab"))
STATUS = JobStatus(began_at_s=100.0, generation=1, members=(A, B), recoveries=())


def events(*statuses: JobStatus) -> list[JobEvent]:
    pairs: Sequence[tuple[JobStatus | None, JobStatus]] = list(
        zip((None, *statuses), statuses, strict=False)
    )
    return [event for before, status in pairs for event in status_events(before, status, NOW_S)]


def test_checkpoint_is_an_event_at_the_time_of_its_storing_once() -> None:
    stored = replace(
        STATUS, checkpoint_step=200, checkpoint_at_s=150.0, checkpoint_url="s3://bucket/run7"
    )
    assert events(stored, stored) == [JobEvent(150.0, "step 200 stored", "s3://bucket/run7")]
    failed = replace(stored, store_failure="step 300: disk full", store_failed_at_s=180.0)
    assert events(stored, failed, failed)[1:] == [
        JobEvent(180.0, "not stored", "step 300: disk full")
    ]


def test_pause_has_its_own_time_and_its_end_the_time_at_which_it_was_seen() -> None:
    paused = replace(STATUS, paused="maintenance", paused_at_s=160.0)
    assert events(paused, paused, STATUS) == [
        JobEvent(160.0, "paused", "maintenance"),
        JobEvent(NOW_S, "resumed"),
    ]


def test_nodes_that_come_and_go_are_events_but_those_of_the_first_status_are_none() -> None:
    alone = replace(STATUS, members=(A,))
    assert [event.what for event in events(STATUS, alone, STATUS)] == [
        "node b left",
        "node b joined",
    ]
