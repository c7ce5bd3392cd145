"""Tests that pages show what they should without costing the thread that diagnoses much."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

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
