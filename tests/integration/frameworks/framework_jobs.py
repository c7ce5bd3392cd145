"""Runs jobs of other frameworks' loops, and kills a worker and then a node of them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.job.jobs import (
    Lines,
    committed_in,
    committed_step_of,
    last_run_of_each_step,
    mean_losses,
    samples,
)
from tests.patient_cluster import PatientCluster

HERE = Path(__file__).parent
Script = str | Callable[[Mapping[str, Any]], list[str]]
"""A script of this folder, which reads its options as JSON, or a command line for the options."""


def cluster(
    script: Script,
    directory: Path,
    *,
    workers: int,
    nnodes: str,
    last_call_s: float = 60.0,
    **options: Any,
) -> PatientCluster:
    """Return a cluster that runs a script; `options` are the script's."""
    (directory / "log").mkdir(parents=True, exist_ok=True)
    options["log"] = str(directory / "log")
    return PatientCluster(
        "job",
        script(options) if callable(script) else [str(HERE / script), json.dumps(options)],
        nnodes=nnodes,
        workers=workers,
        log=directory / "agents",
        last_call_s=last_call_s,
        spares=0,
    )


def run_undisturbed(script: Script, directory: Path, **options: Any) -> Lines:
    """Run a script on one node with two workers, and return the last lines of each step."""
    with cluster(script, directory, workers=2, nnodes="1:1", **options) as running:
        running.start("a")
        assert running.wait("a", 180) == 0, running.output()
    return last_run_of_each_step(directory)


def run_and_kill(script: Script, directory: Path, **options: Any) -> Lines:
    """Run a script on two nodes, kill a worker and then a node; return each step's last lines."""
    with cluster(script, directory, workers=1, nnodes="1:2", pause_s=0.6, **options) as running:
        running.start("a")
        running.start("b")
        before = running.wait_until(lambda view: committed_step_of(view) >= 3, 180)
        running.workers_of("b")[0].kill()
        view = running.wait_until(lambda view: committed_in(view, 2), 180)
        running.kill("b")
        (directory / "log/hurry").touch()
        assert running.wait("a", 180) == 0, running.output()
    recovery = view.history.recoveries[1]
    assert recovery.source == "memory"
    assert recovery.resumed_step >= committed_step_of(before)
    assert "Traceback" not in running.output()
    return last_run_of_each_step(directory)


def check(disturbed: Lines, undisturbed: Lines) -> None:
    """Assert that a job has seen the same samples, and computed the same losses.

    They are the same to the bit while it has as many ranks; fewer add up in another order.
    """
    assert disturbed.keys() == undisturbed.keys()
    # Ranks read their shares of each micro-batch one after the other.
    for step in undisturbed:
        assert sorted(samples({step: disturbed[step]})) == sorted(
            samples({step: undisturbed[step]})
        )
    assert mean_losses(disturbed) == pytest.approx(mean_losses(undisturbed), rel=1e-3)
    generations = set()
    for step, ranks in disturbed.items():
        for rank, line in ranks.items():
            generations.add(line["generation"])
            if line["world_size"] == 2:
                assert line["loss"] == undisturbed[step][rank]["loss"], (step, rank)
    assert generations == {1, 2, 3}
