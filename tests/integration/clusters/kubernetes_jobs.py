"""Starts jobs of `record.py` from the manifests of `ops/kubernetes`, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ops.local_kubernetes.cluster import Cluster, Pod
from ops.local_kubernetes.manifests import Manifest
from ops.local_kubernetes.trial import ROOT, not_possible, running
from tests.adaptive_timeouts import patient
from tests.integration.job.jobs import (
    SCRIPT,
    Lines,
    last_run_of_each_step,
    mean_losses,
    samples,
)


def need_pods() -> None:
    """Skip the test where manifests cannot be rendered, or pods not be run."""
    reason = not_possible()
    if reason is not None:
        pytest.skip(reason)


class Job:
    """A job of `record.py` on a cluster, and what its ranks have recorded.

    Args:
        cluster: which runs it.
        directory: of the records.
    """

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory

    def newest(self) -> dict[str, Any]:
        """Return the line of the newest step; one of step 0 before the first."""
        newest: dict[str, Any] = {"step": 0, "generation": 0, "world_size": 0}
        for path in (self.directory / "log").glob("rank-*.jsonl"):
            complete, _, _ = path.read_text().rpartition("\n")
            if complete:
                line = json.loads(complete.rpartition("\n")[2])
                newest = max(newest, line, key=lambda it: (it["generation"], it["step"]))
        return newest

    def step(self) -> int:
        """Return the newest step that a rank has recorded."""
        return int(self.newest()["step"])

    def wait_for_step(self, step: int, timeout_s: float = 90) -> None:
        self.cluster.wait_until(lambda: self.step() >= step, patient(timeout_s))

    def wait_for_later_generation(self, generation: int, timeout_s: float = 90) -> None:
        """Wait until a step was made in a later generation."""
        self.cluster.wait_until(lambda: self.generation() > generation, patient(timeout_s))

    def wait_for_ranks(self, count: int, timeout_s: float = 90) -> None:
        """Wait until some steps were made by so many ranks."""
        self.cluster.wait_until(lambda: self.newest()["world_size"] == count, patient(timeout_s))
        self.wait_for_step(self.step() + 3)

    def generation(self) -> int:
        """Return the newest generation that has made a step."""
        return int(self.newest()["generation"])

    def lost_steps(self, pod: Pod, generation: int) -> list[int]:
        """Return how many steps each later generation computed again, as a pod's status says."""
        return [it["lost_steps"] for it in self.recoveries(pod, generation)]

    def recoveries(self, pod: Pod, generation: int) -> list[dict[str, Any]]:
        """Return the recoveries after a generation, as `keepstep status` prints them in a pod."""
        command = "keepstep status --store $STORE --job $JOB --once --json"
        printed = self.cluster.execute(pod, "node", "sh", "-c", command)
        found: list[dict[str, Any]] = json.loads(printed)["recoveries"]
        return [it for it in found if it["generation"] > generation]

    def check_losses(self) -> None:
        """Compare samples and losses with those of one process that nothing disturbs."""
        lines = last_run_of_each_step(self.directory)
        complete = {
            step: ranks
            for step, ranks in lines.items()
            if len(ranks) == next(iter(ranks.values()))["world_size"]
        }
        last = max(complete)
        assert complete.keys() == set(range(1, last + 1)), "steps are missing"
        expected = undisturbed(self.directory / "undisturbed", last)
        assert samples(complete) == samples(expected)
        assert mean_losses(complete) == pytest.approx(mean_losses(expected), rel=1e-4)


def undisturbed(directory: Path, steps: int) -> Lines:
    """Return the records of one process without keepstep's agents."""
    (directory / "log").mkdir(parents=True)
    options = {"steps": steps, "log": str(directory / "log"), "disturbed": 0}
    subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])},
        check=True,
        timeout=patient(300),
    )
    return last_run_of_each_step(directory)


def endless(**options: Any) -> list[str]:
    """Return the script, and arguments with which it trains until the test ends the job."""
    values = {
        "steps": 10**6, "endless": True, "disturbed": 0, "log": "/records/log", **options
    }  # fmt: skip
    return ["record.py", json.dumps(values)]


@contextmanager
def kubernetes(directory: Path, manifests: Sequence[Manifest]) -> Iterator[Job]:
    """Run etcd's StatefulSet and a job's objects; yield the job."""
    with running(directory, manifests, SCRIPT) as cluster:
        yield Job(cluster, directory / "records")
