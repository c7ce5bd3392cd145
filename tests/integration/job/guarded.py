"""A training script that evaluates between steps, loses a worker in it, and stops early."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep

log = Path(sys.argv[1])
EVERY = 4


def build(world: keepstep.World) -> keepstep.State:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 1), find_unused_parameters=True)
    return keepstep.State(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1))


def write(*line: object) -> None:
    with (log / f"pid-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([job.world.rank, job.world.generation, *line]) + "\n")


def die_once(name: str) -> None:
    if job.world.rank == 1 and not (log / name).exists():
        (log / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def evaluate() -> float:
    weights = sum(p.detach().sum() for p in job.model.parameters())
    assert isinstance(weights, torch.Tensor)
    dist.all_reduce(weights)
    return float(weights)


def wait_for_commit() -> None:
    """Wait until the last step is safe, so that it is clear what a recovery resumes from."""
    session, generation = job._session, job.world.generation
    while job.steps and not (session.is_committed(job.steps) or session.is_closing(generation)):
        time.sleep(0.005)


with keepstep.join(build) as job:
    for number in (1, 2):
        for points in job.batches(Points(), global_batch=4, steps=20):
            wait_for_commit()
            if job.steps and job.steps % EVERY == 0:
                with job.guard() as guard:
                    if (number, job.steps) == (1, 8):
                        die_once("in-guard")
                    write("evaluated", job.steps, evaluate().hex())
                    # One rank decides: the pass ends after the next step of all.
                    if job.world.rank == 0 and number == 1 and job.steps == 12:
                        job.stop()
                if not guard.completed:
                    write("interrupted", job.steps)
                    continue
            if (number, job.steps) == (1, 12):
                die_once("after-the-decision")
            if (number, job.steps) == (2, 18):
                die_once("in-the-second-pass")
            with job.step():
                loss = job.model(points).square().mean()
                loss.backward()
                job.optimizer.step()
        write("pass", number, job.steps)
        if number == 1:
            guard = job.guard()
            while not guard.completed:
                with guard:
                    write("between", job.steps, evaluate().hex())
    wait_for_commit()
    guard = job.guard()
    while not guard.completed:
        with guard:
            die_once("in-first-guard-after-the-loop")
            write("at last", job.steps, evaluate().hex())
    guard = job.guard()
    while not guard.completed:
        with guard:
            die_once("in-last-guard")
            write("at the very last", job.steps, evaluate().hex())
