"""Records a worker of `keepstep run --monitor`: one telemetry ring for each generation it enters.

The monitor's recorder needs PyTorch, which agents do without, so it is imported where it is used.
A failure is logged once and leaves the worker as it was: a job without a monitor is better than no
job.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping

from keepstep.elastic.worker.messages import Assignment
from keepstep.monitor.errors import MonitorError

log = logging.getLogger("keepstep")

RECORD_VARIABLE = "KEEPSTEP_RECORD"
"""The environment variable by which an agent makes its workers record themselves.

Workers remove it before the script runs."""


def prepare() -> None:
    """Import and build the recorder; building takes seconds, once on each machine."""
    import keepstep.monitor.telemetry.attachment  # noqa: F401
    from keepstep.monitor.telemetry.native import build

    try:
        build()
    except MonitorError:
        pass  # `attach` logs it with the worker's rank; phases are recorded all the same.


def attach(assignment: Assignment) -> None:
    """Record this worker from now on."""
    from keepstep import monitor

    try:
        monitor.attach(
            job=assignment.job,
            rank=assignment.rank,
            node=assignment.node,
            generation=assignment.generation,
        )
    except Exception as error:  # noqa: BLE001 - logged; the job goes on
        log.warning("rank %d is not monitored: %s", assignment.rank, error)


def reopen(assignment: Assignment) -> None:
    """Go on in a ring of this generation, if the worker is recorded and its ring is older."""
    # If nothing has imported the module, nothing has attached.
    attachment = sys.modules.get("keepstep.monitor.telemetry.attachment")
    recorder = attachment.current() if attachment is not None else None
    if attachment is None or recorder is None:
        return
    if recorder.identity.generation == assignment.generation:
        return
    from keepstep.monitor.telemetry.ring import WorkerIdentity

    identity = WorkerIdentity(
        job=assignment.job,
        rank=assignment.rank,
        node=assignment.node,
        generation=assignment.generation,
        world_size=assignment.world_size,
    )
    try:
        recorder.reopen(identity)
    except Exception as error:  # noqa: BLE001 - logged; the job goes on
        log.warning("rank %d is not monitored any more: %s", assignment.rank, error)
        attachment.detach()


def calls_inside() -> int:
    """Return how many threads are inside a call of a back end; 0 if the worker is not recorded."""
    # If nothing has imported the module, nothing has attached.
    attachment = sys.modules.get("keepstep.monitor.telemetry.attachment")
    recorder = attachment.current() if attachment is not None else None
    return 0 if recorder is None else int(recorder.calls_inside)


def environment(assignment: Assignment) -> Mapping[str, str]:
    """Return the variables by which a program that uses PyTorch's process groups records itself."""
    return {
        "KEEPSTEP_MONITOR": "1",
        "KEEPSTEP_JOB": assignment.job,
        "KEEPSTEP_NODE": assignment.node,
    }


def remove_rings(job: str) -> None:
    """Remove the rings of this node's workers that have ended; those of living processes stay."""
    from keepstep.monitor.telemetry.ring_files import Sweeper, job_directory

    try:
        Sweeper(keep_s=0.0).sweep([job_directory(job)], time.monotonic())
    except OSError as error:
        log.warning("telemetry rings of job %s are left behind: %s", job, error)
