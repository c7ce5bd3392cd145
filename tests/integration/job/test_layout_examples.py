"""Examples lose a worker, and go on from memory."""

from pathlib import Path

import pytest

from tests.integration.job.example_runs import run_with_a_killed_worker


@pytest.mark.parametrize(
    ("example", "arguments", "workers"),
    [("train.py", ("--width", "32"), 2)],
)
def test_example_loses_a_worker_and_goes_on_from_memory(
    tmp_path: Path, example: str, arguments: tuple[str, ...], workers: int
) -> None:
    run = run_with_a_killed_worker(tmp_path, example, "--steps", "60", *arguments, workers=workers)
    run.check(60)
    assert run.losses[60] < run.losses[min(run.losses)]
