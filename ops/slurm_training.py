"""Submits the script for Slurm's users to a local cluster, and reads what the ranks recorded.

Tests and a benchmark use it. The script is `examples/slurm/train.sbatch` as it stands: what differs
is given by sbatch's options, and by variables that `keepstep run` reads.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import psutil

from examples.local_cluster import read_steps
from ops.local_slurm import LocalSlurm

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
STEPS = 300
PAUSE_S = 0.3
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

Line = dict[str, float]


def environment(directory: Path) -> dict[str, str]:
    """Return the variables by which a job finds this tree's keepstep, and a secret of its own."""
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples"))),
        "KEEPSTEP_SECRET_FILE": str(directory / "secret"),
        "NODES": "1:2",
        "PET_SPARES": "0",
        # Of `keepstep run`: tests set it to 0 for jobs that nothing ends for them.
        "PET_KEEP_STATE": "5m",
        "OMP_NUM_THREADS": "1",
    }


def training(directory: Path, *, every: int = 10**6) -> list[str]:
    """Return the command line of a small training, which is slow until `directory`/hurry exists.

    Args:
        directory: for what it writes: records of its steps in `steps`, and `checkpoints`.
        every: steps between stored checkpoints.
    """
    (directory / "steps").mkdir(exist_ok=True)
    return [
        *(str(ROOT / "ops" / "paced_training.py"), str(directory / "hurry")),
        *("--width", "32", "--layers", "2", "--context", "32"),
        *("--steps", str(STEPS), "--pause", str(PAUSE_S)),
        *("--log", str(directory / "steps"), "--checkpoint", str(directory / "checkpoints")),
        *("--checkpoint-every", str(every)),
    ]


class SlurmTraining:
    """A job of the script for users, on a cluster that runs.

    Args:
        slurm: the cluster.
        directory: for what the job writes.
        every: steps between stored checkpoints.
    """

    def __init__(self, slurm: LocalSlurm, directory: Path, *, every: int = 10**6) -> None:
        self.slurm = slurm
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.command = training(directory, every=every)

    def submit(self, *options: str, **variables: str) -> str:
        """Submit the script with further options of sbatch; return the job's id."""
        return self.slurm.submit(
            *("--output", str(self.directory / "output-%j.log"), *options),
            *(str(SCRIPT), *self.command),
            **{**environment(self.directory), **variables},
        )

    def output(self) -> str:
        """Return what all jobs have printed."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(self.directory.glob("output-*.log"))
        )

    def lines(self) -> list[Line]:
        """Return what the ranks recorded of their steps, in the order of time."""
        return read_steps(self.directory / "steps")

    def wait_for_step(self, step: int, timeout_s: float, *, world_size: int = 0) -> None:
        """Wait until the last step is this one or a later one, with some number of ranks if given.

        Raises:
            TimeoutError: it was not computed in time; the message has the jobs' output.
        """

        def is_there() -> bool:
            *_, last = self.lines() or [{"step": -1.0, "world_size": 0.0}]
            return last["step"] >= step and world_size in (0, last["world_size"])

        try:
            self.slurm.wait_until(is_there, timeout_s, f"step {step}")
        except TimeoutError as error:
            error.add_note(self.output())
            raise

    def hurry(self) -> None:
        """Let the training compute its other steps without a pause."""
        (self.directory / "hurry").touch()

    def wait_for_end(self, job: str, timeout_s: float) -> dict[str, str]:
        """Wait until a job is over, and return what Slurm shows of it.

        Raises:
            TimeoutError: it was not over in time; the message has the jobs' output.
        """
        try:
            self.slurm.wait_until(
                lambda: self.slurm.job(job)["JobState"] in _ENDED, timeout_s, f"end of job {job}"
            )
        except TimeoutError as error:
            error.add_note(self.output())
            raise
        return self.slurm.job(job)

    def agents(self, node: str) -> list[psutil.Process]:
        """Return the processes of `keepstep run` on a node."""
        return [it for it in self.slurm.processes_of(node) if _is_agent(it)]

    def agent(self, node: str) -> psutil.Process:
        """Return the process of `keepstep run` on a node, of which there is one."""
        (agent,) = self.agents(node)
        return agent

    def worker(self, node: str) -> psutil.Process:
        """Return a node's worker, of which there is one."""
        title = "keepstep.elastic.worker.bootstrap"
        (worker,) = (it for it in self.slurm.processes_of(node) if title in " ".join(it.cmdline()))
        return worker

    def losses(self) -> list[float]:
        """Return the mean loss of each step, as it was computed last."""
        return [
            fmean(line["loss"] for line in runs[-1].values())
            for _, runs in sorted(runs_of_steps(self.lines()).items())
        ]

    def lost_steps(self) -> int:
        """Return how many steps that were completed were computed again."""
        return sum(len(runs) - 1 for runs in runs_of_steps(self.lines()).values())


def runs_of_steps(lines: list[Line]) -> dict[int, list[dict[float, Line]]]:
    """Return by step how often it was computed: the lines of each time, by rank."""
    runs: dict[int, list[dict[float, Line]]] = defaultdict(list)
    for line in lines:
        of_step = runs[int(line["step"])]
        last = of_step[-1] if of_step else {}
        is_again = line["rank"] in last or any(
            line["generation"] != other["generation"] for other in last.values()
        )
        if is_again or not last:
            of_step.append({})
        of_step[-1][line["rank"]] = line
    return runs


def _is_agent(process: psutil.Process) -> bool:
    try:
        _, command, *arguments = process.cmdline()
    except (psutil.Error, ValueError):
        return False
    return command.endswith("/keepstep") and arguments[:1] == ["run"]
