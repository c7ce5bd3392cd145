"""G10: a keepstep job of two nodes on one GPU, of a worker each, loses a worker.

Proves the whole path with state on the device, over gloo, which two ranks can use on one GPU:
snapshots by way of registered memory, recovery, restoring. Passes if a job whose worker is killed
(SIGKILL) ends with the same weights, bit for bit, as one without a failure, and has recovered once.
Not run where keepstep's dependencies are missing. Both jobs run at the same time; each has two
nodes, since a node has at most as many workers as GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ops.gpu.check import Finding
from ops.gpu.environment import LOOPBACK
from ops.gpu.keepstep_tree import require
from ops.gpu.machine import Machine

_WORKER = Path(__file__).with_name("keepstep_worker.py")
_KILL_AT = 20
_LIMIT_S = 54.0
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def check(machine: Machine) -> Finding:
    """Run a job with and a job without a failure, and compare what they end with."""
    deadline_s = time.monotonic() + _LIMIT_S
    require("keepstep.elastic.trainer.join", "keepstep.elastic.agent.agent")
    with tempfile.TemporaryDirectory(prefix="keepstep-gpu-job-") as name:
        directories = {kind: Path(name) / kind for kind in ("undisturbed", "disturbed")}
        jobs = {kind: _start(kind, directory) for kind, directory in directories.items()}
        statuses: dict[str, list[int | None]] = {}
        try:
            killed_at = _kill_one_worker(directories["disturbed"], deadline_s)
            for kind, agents in jobs.items():
                statuses[kind] = [_wait(agent, deadline_s) for agent in agents]
        finally:
            for agent in chain.from_iterable(jobs.values()):
                agent.kill()
                agent.wait()
        for kind, directory in directories.items():
            for log in sorted(directory.glob("*.log")):
                print(f"--- {kind} {log.name}\n{log.read_text(errors='replace')[-1000:]}")
        ends = {kind: _end(directory) for kind, directory in directories.items()}
    undisturbed, disturbed = ends["undisturbed"], ends["disturbed"]
    return Finding(
        {
            "a worker was killed": killed_at > 0,
            "both jobs end well": list(statuses.values()) == [[0, 0]] * 2,
            "the disturbed job has recovered": disturbed.get("generation", 0)
            > undisturbed.get("generation", 0),
            "the weights are equal, bit for bit": bool(undisturbed.get("weights"))
            and undisturbed.get("weights") == disturbed.get("weights"),
            "the state was on the GPU": disturbed.get("device", "").startswith("cuda"),
        },
        {"killed_at_step": killed_at, "statuses": statuses, **ends},
    )


def _start(kind: str, directory: Path) -> list[subprocess.Popen[bytes]]:
    """Start the agents of both nodes of a job; they start a coordinator by themselves."""
    directory.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    agents = []
    for node in ("a", "b"):
        command = [
            sys.executable, "-m", "keepstep", "run", "--rdzv-endpoint", endpoint,
            "--nnodes", "2", "--nproc-per-node", "1", "--node", node,
            "--job", f"gpu-check-{os.getpid()}-{kind}", str(_WORKER), str(directory),
        ]  # fmt: skip
        with (directory / f"{node}.log").open("wb") as log:
            agents.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **LOOPBACK, **_DETERMINISTIC},
                )
            )
    return agents


def _wait(job: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    try:
        return job.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _kill_one_worker(directory: Path, deadline_s: float) -> int:
    """Kill rank 1 once it has made some steps; return the step it had reached, 0 for none."""
    progress = directory / "rank-1.json"
    while time.monotonic() < deadline_s:
        try:
            line: Mapping[str, Any] = json.loads(progress.read_text())
        except (OSError, ValueError):
            line = {"step": 0}
        if line["step"] >= _KILL_AT:
            os.kill(line["process"], signal.SIGKILL)
            return int(line["step"])
        time.sleep(0.01)
    return 0


def _end(directory: Path) -> Mapping[str, Any]:
    """Return what rank 0 wrote at its end; nothing if it did not get there."""
    path = directory / "end.json"
    found: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
