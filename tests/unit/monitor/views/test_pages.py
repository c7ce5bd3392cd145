"""Tests that pages show what they should without costing the thread that diagnoses much."""

import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keepstep.monitor.contracts import JobStatus, RecoveryStatus
from keepstep.monitor.telemetry.record_history import RankHistory
from keepstep.monitor.views import pages
from keepstep.monitor.views.exporter import exposition
from keepstep.monitor.views.pages import (
    delay_matrices,
    operations_for_matrices,
    overview,
    step_timeline,
)
from keepstep.monitor.watch.watch import Watch
from tests.integration.monitor.parts import Probe
from tests.integration.monitor.sample import Plan, SampleReader


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch("node-a", SampleReader(Plan(), time.monotonic() - 8), Probe(), None)
    watch.read()

    def sort_all(_: RankHistory) -> None:
        raise AssertionError("all records of a rank were sorted")

    monkeypatch.setattr(RankHistory, "records", property(sort_all))
    return watch


def test_pages_look_at_few_records_of_each_rank(watch: Watch) -> None:
    ranks = [history.state.rank for history in watch.rank_views.ranks()]
    shown = overview(watch, "job", None, tuple)["ranks"]
    assert [rank["rank"] for rank in shown] == ranks
    assert all(rank["step"] >= rank["last_step"] > 0 for rank in shown)
    timeline = step_timeline(watch, None, ranks, 400)
    assert timeline["step"] == min(rank["last_step"] for rank in shown)
    assert all(
        {"phase", "operation"} == {span["kind"] for span in rank["spans"]}
        for rank in timeline["ranks"]
    )
    matrices = delay_matrices(operations_for_matrices(watch), 32)
    assert matrices["rows"] == tuple((rank,) for rank in ranks)
    assert any(cell is not None for row in matrices["waiting"] for cell in row)


STATUS = JobStatus(began_at_s=0.0, generation=2, members=(), recoveries=())
RECOVERY = RecoveryStatus(2, "lost b", 8, 100.0, 101.0, 102.0, 103.0, 0.0, 5, 0, "memory")


@pytest.mark.parametrize(
    ("status", "pace"),
    [
        (None, "a step takes"),
        (STATUS, "a step takes"),
        (replace(STATUS, paused="maintenance", paused_at_s=90.0), "paused for"),
        (replace(STATUS, changing="lost b"), "changes members"),
        (replace(STATUS, recoveries=(RECOVERY,)), "recovers for"),
        (replace(STATUS, recoveries=(replace(RECOVERY, stepped_at_s=104.0),)), "a step takes"),
    ],
)
def test_pace_of_a_job_is_what_it_does_and_not_what_a_step_took(
    watch: Watch, status: JobStatus | None, pace: str
) -> None:
    assert overview(watch, "job", status, tuple)["pace"]["name"] == pace


def test_job_whose_ranks_make_no_progress_is_not_shown_with_a_time_of_steps() -> None:
    now_s = 100.0
    reader = SampleReader(Plan(ranks=2, hang=(0, 4)), 90.0, clock=lambda: now_s)
    still = Watch("node-a", reader, Probe(), None, now_s=lambda: now_s)
    still.read()
    now_s += 60
    still.read()
    pace = overview(still, "job", None, tuple)["pace"]
    assert pace["name"] == "no progress for"
    assert pace["seconds"] > 50


def test_tokens_of_all_ranks_are_added_and_losses_are_not() -> None:
    watch = Watch("node-a", SampleReader(Plan(reports=True), time.monotonic() - 8), Probe(), None)
    watch.read()
    shown = overview(watch, "job", None, tuple)
    assert shown["reported"]["loss"] == 2.5
    assert shown["reported"]["gradient_norm"] is None
    tokens_per_s = 8 * 512 / shown["typical_step_s"]
    assert shown["reported"]["tokens_per_s"] == pytest.approx(tokens_per_s)


def test_operations_for_matrices_are_bounded_in_number(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MOST_RANKS_IN_MATRICES", 3)
    monkeypatch.setattr(pages, "_MOST_IN_MATRICES", 30)
    operations = operations_for_matrices(watch).ranks
    assert 0 < len(operations) <= 3
    assert sum(len(rank.records) for rank in operations.values()) <= 30


def test_metrics_tell_the_step_of_each_rank_without_sorting_its_records(watch: Watch) -> None:
    """On a root the sorted records of every rank took more memory than all else."""
    families = text_string_to_metric_families(exposition(watch, "job", None).decode())
    (steps,) = [family for family in families if family.name == "keepstep_rank_step"]
    assert {int(sample.labels["rank"]): int(sample.value) for sample in steps.samples} == {
        rank["rank"]: rank["step"] for rank in overview(watch, "job", None, tuple)["ranks"]
    }
