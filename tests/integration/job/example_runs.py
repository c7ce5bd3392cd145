"""Runs an example under `keepstep run`, kills one of its workers, and returns what came of it.

An example prints the loss of its steps, on one rank, as `step 12  loss 3.8330`; of the last step in
any case. More may follow on the line.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.local_cluster import script
from keepstep.elastic.rendezvous.view import View
from tests.integration.job.jobs import committed_step_of
from tests.patient_cluster import PatientCluster

_PRINTED_STEP = re.compile(r"^step +(\d+) +loss +(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRun:
    """The outcome of an example that lost a worker.

    Attributes:
        status: exit status of the agent.
        generation: the one after the loss.
        source: the origin of the state after the loss: "memory", storage, or "start".
        committed_step: the step of the newest snapshot seen before the loss.
        resumed_step: the step that the job resumed from after it.
        losses: by step, as they were printed last.
        output: the end of what the agent and the workers printed.
    """

    status: int
    generation: int
    source: str
    committed_step: int
    resumed_step: int
    losses: Mapping[int, float]
    output: str

    def check(self, steps: int) -> None:
        """Assert that the job went on from memory, lost no committed step, and did all steps."""
        assert self.status == 0, self.output
        assert self.generation >= 2, self.output
        assert self.source == "memory", self.output
        assert self.resumed_step >= self.committed_step > 0, self.output
        # The agent ends with 0 only if the last step was committed.
        assert max(self.losses) == steps, self.output


def printed_losses(directory: Path) -> dict[int, float]:
    """Return the losses that the agents in a directory have shown, by step, as printed last."""
    printed = "".join(path.read_text(errors="replace") for path in sorted(directory.glob("*.log")))
    return {int(step): float(loss) for step, loss in _PRINTED_STEP.findall(printed)}


def wait_for_step(running: PatientCluster, step: int) -> None:
    """Wait until a step, or a later one, is printed; not every example prints each."""
    while max((int(at) for at, _ in _PRINTED_STEP.findall(running.output())), default=0) < step:
        with pytest.raises(subprocess.TimeoutExpired):
            running.agents["a"].wait(0.1)


def run_with_a_killed_worker(
    directory: Path, example: str, *arguments: str, workers: int = 4, after_step: int = 5
) -> ExampleRun:
    """Run an example on one node, and kill a worker of it once some steps are committed.

    Args:
        directory: for the agent's output.
        example: name of the script, in `examples`.
        arguments: its arguments; they let it do many more steps than `after_step`.
        workers: number of ranks.
        after_step: the worker is killed when this step is printed and a snapshot is committed.

    Raises:
        JobOver: the job ended before the worker was killed, or before it recovered.
    """
    with PatientCluster(
        "example", script(example, *arguments), nnodes="1:1", workers=workers, log=directory
    ) as running:
        running.start("a")
        before: list[View] = []

        def has_recovered(view: View) -> bool:
            if not before and view.snapshot is not None:
                before.append(view)
                # Commits are seldom written to the coordinator.
                wait_for_step(running, after_step)
                # The oldest processes are those of the first generation; spares are younger.
                running.workers_of("a")[workers - 1].kill()
            return len(view.history.recoveries) >= 2

        # One wait for both: a fast example may be over before another one begins.
        after = running.wait_until(has_recovered, 120)
        status = running.wait("a", 120)
        output = running.output()
    recovery = after.history.recoveries[1]
    return ExampleRun(
        status=status,
        generation=after.generation_number,
        source=recovery.source,
        committed_step=committed_step_of(before[0]),
        resumed_step=recovery.resumed_step,
        losses=printed_losses(directory),
        output=output,
    )
