"""Lets a job be one run of MLflow, whichever processes log to it.

    from keepstep.integrations.mlflow import start_run

    if rank == 0:
        start_run(run_name="run7")

MLflow resumes a run by an id that its server has given, so none can be named in advance: the run
has a tag with the job's name for it, by which the process that replaces a lost one finds it.
"""

from __future__ import annotations

import os
from typing import Any

import mlflow

from keepstep.elastic.worker.tracker_environment import RUN_VARIABLE

TAG = "keepstep-run"


def start_run(*, tags: dict[str, Any] | None = None, **options: Any) -> Any:
    """Start the job's run in the active experiment, or go on with it; return the active run.

    It is plain `mlflow.start_run` without `keepstep run`, and where MLFLOW_RUN_ID is set.

    Args:
        tags: for a new run, besides the one that it is found by.
        options: of `mlflow.start_run`; for a new run.
    """
    job = os.environ.get(RUN_VARIABLE)
    if job is None or "MLFLOW_RUN_ID" in os.environ:
        return mlflow.start_run(tags=tags, **options)
    found = mlflow.search_runs(
        filter_string=f"tags.`{TAG}` = '{job}'", max_results=1, output_format="list"
    )
    if found:
        return mlflow.start_run(run_id=found[0].info.run_id)
    return mlflow.start_run(tags={**(tags or {}), TAG: job}, **options)
