"""Measures a job of `examples/slurm/train.sbatch` on a Slurm cluster of two nodes on this machine.

`task_kill_gap_s` is the time from SIGKILL of a node's `keepstep run` to the next completed step,
`node_down_gap_s` that from the loss of a node with all of its processes, Slurm's daemon included.
`requeue_lost_steps` counts the steps that are computed again after `scontrol requeue`, and the
other `lost_steps` those after the losses. Gaps are medians of the repetitions, counts their worst.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path

from ops.local_slurm import LocalSlurm, not_installed
from ops.slurm_training import Line, SlurmTraining

__all__ = ["measure", "not_installed"]

AT_STEP = 10
LIMIT_S = 300.0

Result = dict[str, float]


def measure(directory: Path, *, quick: bool) -> Result:
    """Return the medians of gaps, and the worst of lost steps."""
    gaps: dict[str, list[float]] = defaultdict(list)
    lost: dict[str, list[int]] = defaultdict(list)
    for number in range(1 if quick else 3):
        for name in ("task_kill", "node_down", "requeue"):
            place = directory / f"{name}-{number}"
            with LocalSlurm(place / "slurm") as slurm:
                training = SlurmTraining(slurm, place)
                job = training.submit()
                training.wait_for_step(AT_STEP, LIMIT_S)
                if name == "requeue":
                    slurm.call("scontrol", "requeue", job)
                else:
                    gaps[name].append(_gap_s(training, at_s=_disturbed(training, name)))
                training.hurry()
                training.wait_for_end(job, LIMIT_S)
                lost[name].append(training.lost_steps())
    return {
        **{f"{name}_gap_s": round(statistics.median(all_s), 2) for name, all_s in gaps.items()},
        **{f"{name}_lost_steps": max(counts) for name, counts in lost.items()},
    }


def _disturbed(training: SlurmTraining, name: str) -> float:
    """Lose a task, or its node; return the time in monotonic seconds."""
    if name == "node_down":
        return training.slurm.lose_node("n2")
    agent, at_s = training.agent("n2"), time.monotonic()
    os.kill(agent.pid, signal.SIGKILL)
    return at_s


def _gap_s(training: SlurmTraining, *, at_s: float) -> float:
    """Return the time from a loss to the next step that a later generation completed."""
    lost = max(line["generation"] for line in training.lines() if line["at_s"] <= at_s)

    def after() -> list[Line]:
        return [line for line in training.lines() if line["generation"] > lost]

    training.slurm.wait_until(lambda: bool(after()), LIMIT_S, "step after the loss")
    return after()[0]["at_s"] - at_s
