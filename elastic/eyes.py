"""What `keepstep monitor` gets of a job that keepstep runs: its story, a place for verdicts, and hands."""

from __future__ import annotations

from elastic.registry import local_jobs
from elastic.story import CoordinatorStory
from elastic.verdicts import CoordinatorVerdicts
from monitor.daemon.contracts import Runtime


def runtime(store: str | None, job: str) -> Runtime | None:
    """Return what the coordinator at `store` offers, else that of the job of this name on this machine, if any."""
    if store is None:
        store = next((entry.store for entry in local_jobs() if entry.job == job), None)
    if store is None:
        return None
    verdicts = CoordinatorVerdicts(store, job)
    return Runtime(CoordinatorStory(store, job), verdicts, verdicts)
