"""Derives what has happened to a job from two successive statuses of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.monitor.contracts import JobStatus


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened, for people.

    Args:
        at_s: when, by the wall clock.
        what: it was.
        then: what came of it; may be empty.
    """

    at_s: float
    what: str
    then: str = ""


def status_events(before: JobStatus | None, status: JobStatus, wall_s: float) -> Iterator[JobEvent]:
    """Yield what happened since the last status; what has no time of its own happened now.

    Changes of generation are not among it: the status keeps them itself.

    Args:
        before: the last status; None: this is the first of the job.
        status: the current one.
        wall_s: the wall clock.
    """
    if (
        status.checkpoint_step is not None
        and status.checkpoint_at_s
        and (before is None or before.checkpoint_step != status.checkpoint_step)
    ):
        yield JobEvent(
            status.checkpoint_at_s, f"step {status.checkpoint_step} stored", status.checkpoint_url
        )
    if status.store_failure and (before is None or before.store_failure != status.store_failure):
        yield JobEvent(status.store_failed_at_s or wall_s, "not stored", status.store_failure)
    if status.paused and (before is None or before.paused_at_s != status.paused_at_s):
        yield JobEvent(status.paused_at_s, "paused", status.paused)
    if before is None:
        return
    if before.paused and not status.paused:
        yield JobEvent(wall_s, "resumed")
    nodes = {member.node for member in before.members}, {member.node for member in status.members}
    for node in sorted(nodes[1] - nodes[0]):
        yield JobEvent(wall_s, f"node {node} joined")
    for node in sorted(nodes[0] - nodes[1]):
        yield JobEvent(wall_s, f"node {node} left")
