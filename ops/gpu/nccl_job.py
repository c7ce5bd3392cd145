"""G15: a keepstep job over NCCL, sharded by FSDP2, loses a worker, and later one that hangs.

Proves recovery in place on NCCL: the rank that is left waits in kernels for a peer that is gone,
its groups are aborted, and the same process builds them again and goes on. Two nodes of a worker
each share the GPU. One worker is killed (SIGKILL); later its successor is stopped (SIGSTOP), and
killed once the monitor names it. Passes if the monitor does so, the other worker's process is the
same to the end, both failures have been recovered from, and the weights are, bit for bit, those of
a job without a failure. What each recovery takes until the next step is a figure. Not run where
keepstep's dependencies are missing or the recorder cannot be built.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from ops.gpu.check import Finding
from ops.gpu.elastic_jobs import ElasticJob, running_job, send
from ops.gpu.environment import DETERMINISTIC, two_nodes_on_one_gpu
from ops.gpu.keepstep_tree import recorder_library, require
from ops.gpu.machine import Machine

_KILL_AT, _STOP_AT, _STEPS = 20, 40, 80
_LIMIT_S = 56.0
_NAMING_LIMIT_S = 20.0
_STRUCK = 1


def check(machine: Machine) -> Finding:
    """Run a job with and a job without failures, and compare what they end with."""
    deadline_s = time.monotonic() + _LIMIT_S
    require("keepstep.elastic.trainer.join", "keepstep.elastic.agent.agent")
    recorder_library()
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-gpu-job-") as name,
        _job("undisturbed", Path(name)) as undisturbed,
        _job("disturbed", Path(name), "--monitor") as disturbed,
        _monitor(disturbed.name, Path(name)) as events,
    ):
        struck = _strike(disturbed, events, deadline_s)
        statuses = [job.wait(deadline_s) for job in (undisturbed, disturbed)]
        other = disturbed.progress(1 - _STRUCK)
        undisturbed.show()
        disturbed.show()
        print(f"--- monitor\n{(Path(name) / 'monitor.log').read_text()[-1500:]}")
        expected, found = undisturbed.end(), disturbed.end()
    return Finding(
        {
            "a worker was killed, and its successor stopped": struck.get("stopped_at_step", 0) > 0,
            "the monitor names the rank that hangs": struck.get("named") == [_STRUCK],
            "both jobs end well": statuses == [[0, 0]] * 2,
            "the disturbed job has recovered twice": found.get("generation", 0)
            >= expected.get("generation", 0) + 2,
            "the other worker's process is the same to the end": bool(other.process)
            and struck.get("other_process") == other.process,
            "the weights are equal, bit for bit": bool(expected.get("weights"))
            and expected.get("weights") == found.get("weights"),
            "the state was on the GPU": found.get("device", "").startswith("cuda"),
            "the groups were of NCCL": "nccl" in found.get("backend", ""),
        },
        {**struck, "statuses": statuses, "undisturbed": expected, "disturbed": found},
    )


def _job(kind: str, directory: Path, *options: str) -> AbstractContextManager[ElasticJob]:
    return running_job(
        kind,
        directory / kind,
        ["sharded", str(_STEPS)],
        environment=lambda node: {**two_nodes_on_one_gpu(node), **DETERMINISTIC},
        options=options,
    )


def _strike(job: ElasticJob, events: Path, deadline_s: float) -> dict[str, Any]:
    """Kill a worker, stop its successor, and kill that once it is named; return what was seen."""
    struck: dict[str, Any] = {}
    killed = job.strike(_STRUCK, signal.SIGKILL, _KILL_AT, deadline_s)
    if killed is None:
        return struck
    struck["other_process"] = job.progress(1 - _STRUCK).process
    struck["killed_at_step"] = killed.step
    struck["recovery_s"] = [job.recovery_s(_STRUCK, killed.process, deadline_s)]
    known = len(_hangs(events))
    stopped = job.strike(_STRUCK, signal.SIGSTOP, _STOP_AT, deadline_s)
    if stopped is None:
        return struck
    struck["stopped_at_step"] = stopped.step
    began_s = time.monotonic()
    try:
        verdict = _wait_for_hang(events, known, began_s + _NAMING_LIMIT_S)
    finally:
        send(stopped.process, signal.SIGKILL)
    if verdict:
        struck["named_after_s"] = round(time.monotonic() - began_s, 2)
        struck["named"] = verdict["keepstep.verdict.subject.ranks"]
        struck["syndrome"] = verdict["keepstep.verdict.syndrome"]
        struck["evidence"] = verdict["keepstep.verdict.evidence"]
    struck["recovery_s"].append(job.recovery_s(_STRUCK, stopped.process, deadline_s))
    return struck


@contextmanager
def _monitor(job: str, directory: Path) -> Iterator[Path]:
    """Run the monitor of a job; yield the file of its events."""
    events = directory / "events.jsonl"
    command = [
        sys.executable, "-m", "keepstep", "monitor", "--job", job, "--port", "0", "--open-page",
        "--events", str(events),
    ]  # fmt: skip
    with (directory / "monitor.log").open("wb") as log:
        monitor = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield events
    finally:
        monitor.kill()
        monitor.wait()


def _wait_for_hang(events: Path, known: int, deadline_s: float) -> Mapping[str, Any]:
    """Return the first verdict on a hang after `known` others; empty if there is none in time."""
    while time.monotonic() < deadline_s:
        for verdict in _hangs(events)[known:]:
            return verdict
        time.sleep(0.05)
    return {}


def _hangs(events: Path) -> list[Mapping[str, Any]]:
    """Return the attributes of all verdicts on hangs that the monitor has reached."""
    lines = events.read_text().splitlines(keepends=True) if events.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [
        event["attributes"]
        for event in found
        if event["event_name"] == "keepstep.verdict.opened"
        and "hang" in event["attributes"]["keepstep.verdict.syndrome"]
    ]
