"""G10: a keepstep job of two nodes on one GPU, of a worker each, loses a worker.

Proves the whole path with state on the device, over gloo, which two ranks can use on one GPU:
snapshots by way of registered memory, recovery, restoring. Passes if a job whose worker is killed
(SIGKILL) ends with the same weights, bit for bit, as one without a failure, and has recovered once.
Not run where keepstep's dependencies are missing. Both jobs run at the same time.
"""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from ops.gpu.check import Finding
from ops.gpu.elastic_jobs import ElasticJob, running_job
from ops.gpu.environment import DETERMINISTIC, LOOPBACK
from ops.gpu.keepstep_tree import require
from ops.gpu.machine import Machine

_KILL_AT, _STEPS = 20, 400
_LIMIT_S = 54.0


def check(machine: Machine) -> Finding:
    """Run a job with and a job without a failure, and compare what they end with."""
    deadline_s = time.monotonic() + _LIMIT_S
    require("keepstep.elastic.trainer.join", "keepstep.elastic.agent.agent")
    with (
        tempfile.TemporaryDirectory(prefix="keepstep-gpu-job-") as directory,
        _job("undisturbed", Path(directory)) as undisturbed,
        _job("disturbed", Path(directory)) as disturbed,
    ):
        killed = disturbed.strike(1, signal.SIGKILL, _KILL_AT, deadline_s)
        statuses = [job.wait(deadline_s) for job in (undisturbed, disturbed)]
        undisturbed.show()
        disturbed.show()
        expected, found = undisturbed.end(), disturbed.end()
    return Finding(
        {
            "a worker was killed": killed is not None,
            "both jobs end well": statuses == [[0, 0]] * 2,
            "the disturbed job has recovered": found.get("generation", 0)
            > expected.get("generation", 0),
            "the weights are equal, bit for bit": bool(expected.get("weights"))
            and expected.get("weights") == found.get("weights"),
            "the state was on the GPU": found.get("device", "").startswith("cuda"),
        },
        {
            "killed_at_step": 0 if killed is None else killed.step,
            "statuses": statuses,
            "undisturbed": expected,
            "disturbed": found,
        },
    )


def _job(kind: str, directory: Path) -> AbstractContextManager[ElasticJob]:
    return running_job(
        kind,
        directory / kind,
        ["whole", str(_STEPS)],
        environment=lambda node: {**LOOPBACK, **DETERMINISTIC},
    )
