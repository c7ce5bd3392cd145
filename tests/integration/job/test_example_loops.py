"""Loops that a person would copy lose a worker, and go on from memory."""

import re
from pathlib import Path

import pytest

from tests.integration.job.example_runs import run_with_a_killed_worker


@pytest.mark.parametrize(
    ("example", "steps", "options"),
    [
        ("minimal.py", 500, ()),
        ("lora.py", 60, ("--width", "32")),
        # TorchInductor takes a minute to compile for the first time on a machine.
        ("compiled.py", 60, ("--width", "32", "--layers", "1", "--backend", "aot_eager")),
        ("accumulation.py", 40, ("--width", "32", "--global-batch", "4", "--micro-batch", "1")),
        ("distillation.py", 150, ()),
        ("attach.py", 192, ()),
    ],
)
def test_example_loses_a_worker_and_goes_on_learning(
    tmp_path: Path, example: str, steps: int, options: tuple[str, ...]
) -> None:
    run = run_with_a_killed_worker(tmp_path, example, "--steps", str(steps), *options, workers=2)
    run.check(steps)
    assert run.losses[steps] < run.losses[min(run.losses)]


def test_two_models_and_two_optimizers_lose_a_worker_and_learn_the_ring(tmp_path: Path) -> None:
    run = run_with_a_killed_worker(
        tmp_path, "gan.py", "--steps", "300", "--global-batch", "64", workers=2
    )
    run.check(300)
    radius = re.findall(r"radius (\S+)", run.output)
    assert float(radius[-1]) == pytest.approx(1.0, abs=0.4)


def test_evaluated_loop_loses_a_worker_and_stops_by_itself(tmp_path: Path) -> None:
    options = ("--learning-rate", "0.05", "--patience", "2", "--steps", "1000")
    run = run_with_a_killed_worker(tmp_path, "evaluation.py", *options, workers=2)
    stopped = [int(step) for step in re.findall(r"stopped after step (\d+)", run.output)]
    evaluated = [int(step) for step in re.findall(r"after step (\d+): held-out", run.output)]
    assert len(stopped) == 1, run.output
    # One step after the evaluation that was one too many.
    assert stopped == [evaluated[-1] + 1]
    # The loss is printed at the steps that are evaluated.
    run.check(stopped[0] - 1)
