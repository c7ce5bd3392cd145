"""Claims about scripts of passes and guards on ranks that are lost: see `script_place`.

All ranks issue the same collectives in each generation (`Process.meet` checks it), and the job ends
with the state of an undisturbed run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.elastic.trainer.job import Job
from tests.sim.script_ranks import Cluster, Gone, Process, mixed

_EXAMPLES = int(os.environ.get("KEEPSTEP_SEEDS", "150"))


@dataclass(frozen=True)
class Outside:
    """A guard outside of loops; `asked`: `while not guard.completed`."""

    form: Literal["asked", "unconditional"] = "asked"


@dataclass(frozen=True)
class Loop:
    """A loop over a pass of `steps` batches.

    Attributes:
        before: after each so many steps a guard stands before the step; 0: none.
        after: the same after the step.
        after_form: how that one is written.
        stop_at: the number of steps after which rank 0 calls `job.stop()`, in the guard before the
            step if there is one.
        skips: the loop leaves out each batch of which the number is a multiple; 0: none.
    """

    steps: int
    before: int = 0
    after: int = 0
    after_form: Literal["if completed", "always", "while"] = "if completed"
    stop_at: int = -1
    skips: int = 0


@dataclass(frozen=True)
class Script:
    """Loops and guards, and after how many steps all loops are left by `break`; -1: never."""

    parts: tuple[Outside | Loop, ...]
    break_at: int = -1


def run(script: Script, process: Process) -> None:
    """Run a script as users write them."""
    job = process.job
    for number, part in enumerate(script.parts):
        if isinstance(part, Outside):
            _run_outside(part, number, process, job)
        else:
            _run_loop(part, number, script.break_at, process, job)
            if job._passes.place.end > job._state.position.batch:
                return  # It was left by `break`: no other pass may begin.


def _run_outside(part: Outside, number: int, process: Process, job: Job) -> None:
    if part.form == "asked":
        guard = job.guard()
        while not guard.completed:
            with guard:
                process.meet("outside", number, process.weights, process.extra)
                process.extra = mixed(process.extra, number, process.weights)
    else:
        with job.guard():
            # It runs again, for a later state, and so changes nothing.
            process.meet("unconditional", number, process.weights, process.extra)


def _run_loop(part: Loop, number: int, break_at: int, process: Process, job: Job) -> None:
    for _ in job.batches(range(100), 4, steps=part.steps, shuffle=False):
        if job.steps == break_at:
            break
        batch = job._state.position.batch
        if part.skips and batch % part.skips == 0:
            continue
        if part.before and job.steps % part.before == 0:
            with job.guard() as guard:
                process.meet("before", number, process.weights, process.extra)
                process.extra = mixed(process.extra, "before", process.weights)
                _stop_if_due(part, process)
            if not guard.completed:
                continue
        elif not part.before:
            _stop_if_due(part, process)
        with job.step() as step:
            process.meet("step", job.steps, batch, process.weights, process.extra)
            process.weights = mixed(process.weights, batch, process.extra)
        if part.after and job.steps % part.after == 0:
            if part.after_form == "if completed" and not step.completed:
                continue
            guard = job.guard()
            if part.after_form == "while":
                while not guard.completed:
                    with guard:
                        process.meet("after", number, process.weights, process.extra)
            else:
                with guard:
                    process.meet("after", number, process.weights, process.extra)


def _stop_if_due(part: Loop, process: Process) -> None:
    if process.rank == 0 and process.job.steps == part.stop_at:
        process.job.stop()


outsides = st.builds(Outside, st.sampled_from(["asked", "asked", "asked", "unconditional"]))
loops = st.builds(
    Loop,
    steps=st.integers(1, 4),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    after_form=st.sampled_from(["if completed", "always", "while"]),
    stop_at=st.integers(-1, 6),
    skips=st.sampled_from([0, 0, 0, 2, 3]),
)
scripts = st.builds(
    Script,
    st.lists(st.one_of(outsides, loops), min_size=1, max_size=6).map(tuple),
    st.sampled_from([-1, -1, -1, 2, 5]),
)


@settings(max_examples=_EXAMPLES)
@given(
    script=scripts,
    size=st.integers(2, 3),
    seed=st.integers(0, 2**16),
    kills=st.dictionaries(st.integers(0, 250), st.integers(0, 2), max_size=4),
    joins=st.lists(st.integers(0, 250), max_size=2),
    snapshot_every=st.integers(1, 2),
)
def test_all_ranks_issue_the_same_collectives_and_end_as_if_undisturbed(
    script: Script,
    size: int,
    seed: int,
    kills: dict[int, int],
    joins: list[int],
    snapshot_every: int,
) -> None:
    expected = Cluster(size, lambda process: run(script, process), 0).run()
    found = Cluster(
        size, lambda process: run(script, process), seed, kills, joins, snapshot_every
    ).run()
    assert found == expected


EPOCHS = Script((Loop(5), Outside()) * 4)
"""An outer loop over epochs, with an evaluation after each."""


@pytest.mark.parametrize("seed", range(10))
def test_guards_of_passes_that_are_over_are_left_out_and_nobody_else_restarts(seed: int) -> None:
    """Rank 1 is lost in the middle of the third pass."""

    def lose_rank_1(process: Process) -> None:
        meet = process.meet

        def meet_or_die(*label: object, brings: int = 1) -> int:
            if process.rank == process.generation == 1 and process.job.steps == 13:
                raise Gone
            return meet(*label, brings=brings)

        process.meet = meet_or_die  # type: ignore[method-assign]
        run(EPOCHS, process)

    cluster = Cluster(2, lose_rank_1, seed)
    assert cluster.run() == Cluster(2, lambda process: run(EPOCHS, process), 0).run()
    assert (cluster.generation, cluster.restarts) == (2, [])
    guards_run = {
        generation: [one.label[1] for one in met.values() if one.label[0] == "outside"]
        for generation, met in cluster.meetings.items()
    }
    assert guards_run == {1: [1, 3], 2: [5, 7]}
