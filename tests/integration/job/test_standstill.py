"""Claims about a job of which a rank hangs where nothing of the worker itself can answer."""

import os
from pathlib import Path

import pytest

from tests.patient_cluster import PatientCluster

ROOT = Path(__file__).parents[3]
HANGS_AT = 5
SCRIPT = f"""
import ctypes, functools, sys, time, torch, keepstep
import torch.distributed as dist

def build(world):
    return keepstep.State(torch.nn.Linear(4, 4), functools.partial(torch.optim.SGD, lr=0.1))

def never_returns():
    ctypes.PyDLL(None).sleep(10**6)  # As a driver's call may, it holds the interpreter's lock.

with keepstep.join(build) as job:
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    for (batch,) in job.batches(data, global_batch=4):
        with job.step():
            if job.world.rank == 1 and job.steps == {HANGS_AT}:
                never_returns()
            job.model(batch).square().mean().backward()
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
            job.optimizer.step()
"""


def test_rank_in_a_call_that_never_returns_is_restarted_once_and_then_ends_the_job_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(ROOT))
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.fspath(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    running = PatientCluster(
        "job", [str(script)], nnodes="2:2", workers=1, log=tmp_path / "agents", last_call_s=60.0
    )
    with running:
        for node in "ab":
            running.start(node, "--standstill-limit", "0.1", "--abort-timeout", "2")
        for node in "ab":
            assert running.wait(node, 120) == 1
    output = running.output()
    assert "generation 2: 2 ranks on 2 nodes (no rank on" in output
    assert "generation 3" not in output
    # The end of the job names the place, and has the stacks of both nodes' ranks.
    ending = output.partition("keepstep: no rank on")[2]
    assert f"(twice: the job stood still after step {HANGS_AT}" in ending
    assert "rank 1 in never_returns (train.py" in ending
    assert "all_reduce" in ending
