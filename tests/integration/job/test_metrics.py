"""The claim that metrics have each step once, although the worker that writes them is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.job.jobs import set_module_path
from tests.patient_cluster import PatientCluster

ROOT = Path(__file__).parents[3]
STEPS = 60


def test_a_file_of_metrics_has_each_step_once(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    run_and_kill_rank_0(tmp_path, "--metrics", metrics, lambda: steps_in(metrics))
    assert steps_in(metrics) == list(range(1, STEPS + 1))


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard is not installed",
    )

    def shown_steps() -> list[int]:
        if not (tmp_path / "board").exists():
            return []
        events = reading.EventAccumulator(str(tmp_path / "board"))
        events.Reload()
        has_begun = "loss" in events.Tags()["scalars"]
        return [event.step for event in events.Scalars("loss")] if has_begun else []

    run_and_kill_rank_0(tmp_path, "--tensorboard", tmp_path / "board", shown_steps)
    assert shown_steps() == list(range(1, STEPS + 1))


def run_and_kill_rank_0(
    directory: Path, option: str, path: Path, steps: Callable[[], list[int]]
) -> None:
    """Run a job that writes to a path, and kill a worker once steps were written."""
    options = ["--steps", str(STEPS), "--width", "32", "--layers", "1", "--context", "16"]
    script = [str(ROOT / "examples" / "train.py"), *options, option, str(path)]
    with PatientCluster(
        "job", [*script, "--snapshot-every", "7"], nnodes="1", workers=2, log=directory / "agents"
    ) as running:
        running.start("a")
        # Steps that no snapshot has are written, and are computed again.
        running.wait_until(lambda _: len(steps()) > 10, 60)
        running.workers_of("a")[0].kill()
        assert running.wait("a", 120) == 0, running.output()


def steps_in(metrics: Path) -> list[int]:
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith("}\n")]


def test_a_trackers_record_has_each_step_once(tmp_path: Path) -> None:
    """Nothing is removed from it, and the process that writes it is killed twice."""
    script = [str(Path(__file__).with_name("tracked.py")), str(tmp_path)]
    with (
        pytest.MonkeyPatch.context() as patch,
        PatientCluster("job", script, nnodes="1", workers=2, log=tmp_path / "agents") as running,
    ):
        set_module_path(patch)
        running.start("a")
        assert running.wait("a", 120) == 0, running.output()
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert [int(line.partition(",")[0]) for line in lines] == list(range(1, 41))
    assert (tmp_path / "died-9").exists()
    assert (tmp_path / "died-21").exists()
