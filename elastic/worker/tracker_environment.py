"""Lets a tracker's run go on as one over the processes that follow each other in a job.

A process that replaces a lost one runs the script from its beginning, and would begin a run of its
own. W&B goes on with the run that its variables name, so they name one for each rank of the job.
What the user has set stays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from keepstep.elastic.worker.messages import Assignment

RUN_VARIABLE = "KEEPSTEP_RUN_ID"
"""The variable that names the job's run for other trackers; all ranks have the same."""
_WANDB = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")
_MOST_CHARACTERS = 40
"""W&B takes 64, and the rest of the name follows."""


def run_id(assignment: Assignment) -> str:
    """Return a name for the job's run: a later job of the same name has another secret."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", assignment.job)[:_MOST_CHARACTERS]
    digest = hashlib.sha256(f"run id {assignment.secret}".encode()).hexdigest()
    return f"{name}-{digest[:8]}"


def tracker_variables(assignment: Assignment, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables to set in a process of this rank, the same names in all ranks.

    Args:
        assignment: the rank, and its job.
        environment: that of the process, perhaps with those of an earlier generation.
    """
    run = run_id(assignment)
    variables = {RUN_VARIABLE: run}
    is_own = environment.get("WANDB_RUN_ID", "").startswith(run)
    if is_own or not any(name in environment for name in _WANDB):
        # Ranks that each begin a run must not write to the same one.
        of_rank = f"{run}-rank{assignment.rank}" if assignment.rank else run
        variables |= {"WANDB_RUN_ID": of_rank, "WANDB_RESUME": "allow"}
    return variables
