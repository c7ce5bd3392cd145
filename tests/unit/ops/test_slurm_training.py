"""Tests of how steps that were computed again are counted."""

from ops.slurm_training import Line, runs_of_steps


def line(step: int, rank: int, generation: int, loss: float = 0.0) -> Line:
    return {"step": step, "rank": rank, "generation": generation, "loss": loss}


def test_step_of_several_ranks_is_computed_once() -> None:
    runs = runs_of_steps([line(1, 0, 1), line(1, 1, 1), line(2, 1, 1), line(2, 0, 1)])
    assert {step: [sorted(run) for run in of_step] for step, of_step in runs.items()} == {
        1: [[0, 1]],
        2: [[0, 1]],
    }


def test_step_of_a_later_generation_or_of_a_requeued_job_is_computed_again() -> None:
    by_fewer_ranks = [line(1, 0, 1), line(1, 1, 1), line(1, 0, 2, loss=2.0)]
    assert [sorted(run) for run in runs_of_steps(by_fewer_ranks)[1]] == [[0, 1], [0]]
    assert runs_of_steps(by_fewer_ranks)[1][-1][0]["loss"] == 2.0
    # Generations count from 1 again where the coordinator is a new one.
    requeued = [line(1, 0, 1), line(1, 1, 1), line(1, 1, 1), line(1, 0, 1)]
    assert [sorted(run) for run in runs_of_steps(requeued)[1]] == [[0, 1], [0, 1]]
