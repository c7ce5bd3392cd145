"""Starts complete jobs for tests, and reads what their ranks recorded."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.elastic.rendezvous.view import View
from tests.adaptive_timeouts import patient
from tests.patient_cluster import PatientCluster

STEPS = 30
_MANY = 10**6
SCRIPT = Path(__file__).parent / "record.py"
Lines = dict[int, dict[int, dict[str, Any]]]


def cluster(
    directory: Path,
    nnodes: str = "1:2",
    store: str | None = None,
    *,
    workers: int = 2,
    disturbed: int = 1,
    spares: int = 0,
    endless: bool = False,
    **options: Any,
) -> PatientCluster:
    """Return a cluster that runs `record.py` with these options; use it as a context manager.

    Args:
        directory: of the records.
        nnodes: as for `keepstep run`.
        store: URL of a coordinator that runs; None: start one.
        workers: of each node.
        disturbed: how many generations the test ends, which do not take the last steps before.
        spares: warm processes of each node, of which each takes processor time from other tests.
        endless: the test ends the job.
        options: of the script.
    """
    (directory / "log").mkdir(parents=True, exist_ok=True)
    script_options = json.dumps(
        {
            "steps": _MANY if endless else STEPS,
            "endless": endless,
            "log": str(directory / "log"),
            "disturbed": disturbed,
            **options,
        }
    )
    # The long last call keeps the first generation open for a second node that starts late.
    return PatientCluster(
        "job",
        [str(SCRIPT), script_options],
        nnodes=nnodes,
        workers=workers,
        log=directory / "agents",
        last_call_s=60.0,
        store=store,
        spares=spares,
    )


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that `make` has filled, once for all processes that run these tests.

    What an undisturbed job computes is the same every time.
    """
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "made").exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                set_module_path(patch)
                make(directory)
            (directory / "made").touch()
    return directory


def set_module_path(patch: pytest.MonkeyPatch) -> None:
    """Let jobs import the examples' modules."""
    root = Path(__file__).parents[3]
    patch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "examples")]))


def last_run_of_each_step(directory: Path) -> Lines:
    """Return, by step and rank, the lines of the last generation that computed the step."""
    recorded: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for path in (directory / "log").glob("rank-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            recorded[line["step"]][line["generation"]].append(line)
    return {
        step: {line["rank"]: line for line in generations[max(generations)]}
        for step, generations in recorded.items()
    }


def samples(lines: Lines) -> list[int]:
    """Return all samples, ordered by step and then by rank."""
    return [
        sample
        for step in sorted(lines)
        for rank in sorted(lines[step])
        for sample in lines[step][rank]["samples"]
    ]


def mean_losses(lines: Lines) -> list[float]:
    return [
        sum(float.fromhex(line["loss"]) for line in lines[step].values()) / len(lines[step])
        for step in sorted(lines)
    ]


def step_of(view: View) -> int:
    return max((joined.record.step for joined in view.nodes.values()), default=0)


def committed_step_of(view: View) -> int:
    """Return the step of the newest committed snapshot; 0 before the first one."""
    return view.snapshot.snapshot.step if view.snapshot else 0


def committed_in(view: View, generation: int) -> bool:
    """Return whether a step is committed that a generation has computed."""
    last = next(reversed(view.history.recoveries), None)
    return (
        last is not None
        and view.snapshot is not None
        and view.snapshot.snapshot.generation == last.generation == generation
        and view.snapshot.snapshot.step > last.resumed_step
    )


def wait_for_output(running: PatientCluster, text: str) -> None:
    """Wait until an agent has printed a text, while node a's agent lives."""
    deadline_s = time.monotonic() + patient(60)
    while text not in running.output():
        assert time.monotonic() < deadline_s, running.output()
        with pytest.raises(subprocess.TimeoutExpired):
            running.agents["a"].wait(0.2)
