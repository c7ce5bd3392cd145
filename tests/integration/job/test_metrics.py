"""The claim that a file of metrics has each step once, although a worker is killed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.patient_cluster import PatientCluster

ROOT = Path(__file__).parents[3]
STEPS = 60


def test_metrics_have_each_step_once_though_the_worker_that_writes_them_is_killed(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    options = ["--steps", str(STEPS), "--width", "32", "--layers", "1", "--context", "16"]
    script = [str(ROOT / "examples" / "train.py"), *options, "--metrics", str(metrics)]
    with PatientCluster(
        "job", [*script, "--snapshot-every", "7"], nnodes="1", workers=2, log=tmp_path / "agents"
    ) as running:
        running.start("a")
        # Steps that no snapshot has are written, and are computed again.
        running.wait_until(lambda _: metrics.exists() and len(steps_in(metrics)) > 10, 60)
        running.workers_of("a")[0].kill()
        assert running.wait("a", 120) == 0, running.output()
    assert steps_in(metrics) == list(range(1, STEPS + 1))


def steps_in(metrics: Path) -> list[int]:
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith("}\n")]
