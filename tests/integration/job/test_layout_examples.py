"""Every example of a layout loses a worker, and goes on from memory.

`tensor_parallel.py` loses a node in `test_layout_rules`.
"""

from pathlib import Path

import pytest

from tests.integration.job.example_runs import run_with_a_killed_worker

STEPS = 40


@pytest.mark.parametrize(
    ("example", "workers", "arguments"),
    [
        ("ddp", 2, ()),
        ("fsdp2", 2, ()),
        ("hsdp", 4, ()),
        ("pipeline", 2, ("--schedule", "1F1B")),
        ("pipeline", 2, ("--schedule", "InterleavedZeroBubble")),
        ("experts", 2, ()),
        ("context_parallel", 2, ()),
    ],
)
def test_layout_survives_the_loss_of_a_rank(
    tmp_path: Path, example: str, workers: int, arguments: tuple[str, ...]
) -> None:
    script = f"layouts/{example}.py"
    run = run_with_a_killed_worker(
        tmp_path, script, "--steps", str(STEPS), *arguments, workers=workers, after_step=3
    )
    run.check(STEPS)
    assert run.losses[STEPS] < run.losses[1]
