"""A job that begins from a file of `torch.save`, is killed, and has its own checkpoint then."""

import math
from pathlib import Path

import pytest
import torch

from examples.gpt import GPT, GPTConfig, initialize
from tests.integration.job.jobs import cluster, committed_step_of, last_run_of_each_step

FIRST = 5


def saved(path: Path) -> None:
    """Save a model whose loss is known: all next bytes are as probable."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(width=32, layers=2, context=32, heads=2, dropout=0.0))
    initialize(model)
    torch.nn.init.zeros_(model.head.weight)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict() | {"last_epoch": FIRST},
        "step": FIRST,
    }
    torch.save(content, path)


def test_a_job_begins_at_the_step_of_another_tools_file_and_recovers_from_its_own_state(
    tmp_path: Path,
) -> None:
    saved(tmp_path / "a.pt")
    options = {"checkpoint": str(tmp_path / "checkpoints"), "start_from": f"torch:{tmp_path}/a.pt"}
    with cluster(tmp_path / "first", "1:1", **options) as running:
        running.start("a")
        running.wait_until(lambda view: committed_step_of(view) >= FIRST + 3, 60)
        running.workers_of("a")[1].kill()
        view = running.wait_until(lambda view: len(view.history.recoveries) == 2, 60)
        assert running.wait("a", 120) == 0, running.output()
    begun, recovered = view.history.recoveries
    assert begun.source == "start_from (torch.save, step 5)"
    assert recovered.source == "memory"
    assert recovered.resumed_step >= FIRST + 3
    steps = last_run_of_each_step(tmp_path / "first")
    assert set(steps) == set(range(FIRST + 1, FIRST + 31))
    for line in steps[FIRST + 1].values():
        assert float.fromhex(line["loss"]) == pytest.approx(math.log(256), abs=1e-6)
    # From now on the job has a checkpoint of its own: nobody looks for the file.
    (tmp_path / "a.pt").unlink()
    with cluster(tmp_path / "second", "1:1", disturbed=0, **options, steps=32) as running:
        running.start("a")
        view = running.wait_until(lambda view: len(view.history.recoveries) == 1, 60)
        assert running.wait("a", 120) == 0, running.output()
    assert view.history.recoveries[0].source.startswith("storage")
    assert set(last_run_of_each_step(tmp_path / "second")) == {FIRST + 31, FIRST + 32}
