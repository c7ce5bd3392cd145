"""A worker of `keepstep run --monitor` records itself: one ring for each generation that it lives through.

The monitor's recorder needs PyTorch, which agents do without, so it is imported where it is used. Whatever goes wrong is said once and
leaves the worker as it was: a job that nobody watches is better than none.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from keepstep.monitor.errors import MonitorError

if TYPE_CHECKING:
    from keepstep.elastic.worker.session import Assignment

log = logging.getLogger("keepstep")

RECORD_VARIABLE = "KEEPSTEP_RECORD"
"""Environment variable by which an agent tells its workers to record themselves; they take it away before the script runs."""


def prepare() -> None:
    """Have what recording needs imported and built, while the worker warms up: building takes seconds, once on each machine."""
    import keepstep.monitor.telemetry.attachment  # noqa: F401
    from keepstep.monitor.telemetry.native import build

    try:
        build()
    except MonitorError:
        pass  # Said when the worker attaches, with its rank, and phases are recorded all the same.


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
    except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running; its consequence is logged
        log.warning("rank %d is not monitored: %s", assignment.rank, error)


def reopen(assignment: Assignment) -> None:
    """Go on in a ring of the generation that this worker enters, if it is recorded and its ring is of an earlier one."""
    # Where nobody has imported it, nobody has attached.
    attachment = sys.modules.get("keepstep.monitor.telemetry.attachment")
    recorder = attachment.current() if attachment is not None else None
    if (
        attachment is None
        or recorder is None
        or recorder.identity.generation == assignment.generation
    ):
        return
    from keepstep.monitor.telemetry.ring import WorkerIdentity

    try:
        recorder.reopen(
            WorkerIdentity(
                assignment.job, assignment.rank, assignment.node, assignment.generation, assignment.world_size
            )
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - a monitor that fails must leave the job running; its consequence is logged
        log.warning("rank %d is not monitored any more: %s", assignment.rank, error)
        attachment.detach()


def environment(assignment: Assignment) -> Mapping[str, str]:
    """Return the variables by which a program that enters a process group of PyTorch records itself."""
    return {
        "KEEPSTEP_MONITOR": "1",
        "KEEPSTEP_JOB": assignment.job,
        "KEEPSTEP_NODE": assignment.node,
    }


def remove_rings(job: str) -> None:
    """Remove what workers of this node left behind. Rings of processes that live, such as another agent's here, stay."""
    from keepstep.monitor.telemetry.ring_files import Sweeper, job_directory

    try:
        Sweeper(keep_s=0.0).sweep([job_directory(job)], time.monotonic())
    except OSError as error:
        log.warning("telemetry rings of job %s are left behind: %s", job, error)
