"""Claims about scripts that keepstep has not started: by `python`, in a notebook, by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.worker.unmanaged_session import UnmanagedSession
from tests.adaptive_timeouts import patient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]

SCRIPT = """
import functools, sys
import torch
import keepstep

def build(world):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    if world.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return keepstep.State(model, functools.partial(torch.optim.SGD, lr=0.1))

def train(fails):
    with keepstep.join(build) as job:
        for x in job.batches(torch.eye(4).repeat(10, 1), 8, epochs=2):
            with job.step() as step:
                (job.model(x).square().mean() * step.loss_scale).backward()
                job.optimizer.step()
            if fails and job.steps == 2:
                raise ValueError("the script's own")
        guard = job.guard()
        while not guard.completed:
            with guard:
                total = torch.ones(1)
                torch.distributed.all_reduce(total)
        weight = sum(parameter.sum().item() for parameter in job.model.parameters())
        counts = f"{job.steps} steps, {int(total)} ranks"
        print(f"rank {job.world.rank}: {counts}, {weight:.5f}\\n", end="")

for fails in map(int, sys.argv[1:]):
    try:
        train(fails)
    except ValueError as error:
        print("raised", error)
"""

ENDLESS = """
import functools, signal
import torch
import keepstep

# Shells start what runs in their background with this ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def build(world):
    return keepstep.State(torch.nn.Linear(4, 1), functools.partial(torch.optim.SGD, lr=0.1))

with keepstep.join(build) as job:
    for x in job.batches(torch.eye(4), 4, epochs=10**9):
        with job.step():
            job.model(x).square().mean().backward()
            job.optimizer.step()
        if job.steps == 2:
            print("trains", flush=True)
"""


def run(tmp_path: Path, *launcher: str, arguments: tuple[str, ...] = ("0",)) -> tuple[str, str]:
    """Return what a script prints, sorted by line, and its errors."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *launcher, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return "\n".join(sorted(done.stdout.splitlines())), done.stderr


def test_a_script_runs_alone_and_again_after_an_error_and_by_torchrun(tmp_path: Path) -> None:
    alone, said = run(tmp_path, arguments=("0", "1", "0"))
    once, _, again = sorted(alone.splitlines(), key=lambda line: line.startswith("raised"))[:3]
    assert "raised the script's own" in alone
    assert once.startswith("rank 0: 10 steps, 1 ranks")
    assert alone.count(once) == 2, again
    assert said.count("`keepstep run` has not started this process") == 3
    by_torchrun, said = run(
        tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    )
    weight = once.rpartition(" ")[2]
    assert by_torchrun.splitlines() == [
        f"rank {rank}: 10 steps, 2 ranks, {weight}" for rank in range(2)
    ]
    assert said.count("runs on 2 ranks, as torchrun has started them, without recovery") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_script_that_runs_alone(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "train.py"
    path.write_text(ENDLESS)
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as script:
        assert script.stdout is not None
        try:
            assert script.stdout.readline() == "trains\n"
            script.send_signal(number)
            assert script.wait(patient(30)) == -number
        finally:
            script.kill()


def test_what_only_an_agent_can_do_is_refused() -> None:
    session = UnmanagedSession({})
    assert session.wait_for_assignment(0).world_size == 1
    with pytest.raises(UsageError, match=r"go back to a snapshot here.*keepstep run"):
        session.wait_for_assignment(1)
    with pytest.raises(UsageError, match="mesh= does not fit 1 ranks"):
        session.wait_for_closing(1)
