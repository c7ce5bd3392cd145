"""Runs one worker of goodput.py: the same model and global batches for each contender.

`goodput_worker.py MODE DIRECTORY`. Every step appends a line to a file of the rank, with the
samples that the rank computed the step from.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, initialize
from text import Windows, standard_library
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW

from ops.bench.gpt_training import (
    CONTEXT,
    GLOBAL_BATCH,
    LEARNING_RATE,
    ReplicaGroup,
    agree_on_epoch,
    initialized,
    join_torchrun,
    record_step,
    sharded_model,
)

STEPS = 1_000_000
MODE, DIRECTORY = sys.argv[1], Path(sys.argv[2])
CHECKPOINT_EVERY = 10
"""Steps between torchrun's checkpoints: about 2.5 s. A save takes less, so none is waited for."""


class Recorded:
    """A dataset that notes which samples were read since the last step was recorded."""

    def __init__(self) -> None:
        self._windows = Windows(standard_library(), CONTEXT)
        self.indices: list[int] = []

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.indices.append(index)
        return self._windows[index]


def read(dataset: Recorded, step: int, rank: int, size: int) -> tuple[Any, list[int]]:
    """Return a rank's share of the batch after `step` steps, and which samples it has."""
    begin = step * GLOBAL_BATCH + GLOBAL_BATCH * rank // size
    end = step * GLOBAL_BATCH + GLOBAL_BATCH * (rank + 1) // size
    dataset.indices.clear()
    batch = torch.utils.data.default_collate([dataset[i % len(dataset)] for i in range(begin, end)])
    return batch, list(dataset.indices)


def run_torchrun() -> None:
    """Train with FSDP2 under torchrun, and save with DCP's `async_save`."""
    attempt = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    rank, size = join_torchrun(f"{attempt}-{os.environ['WORLD_SIZE']}", timedelta(seconds=60))
    saving = dist.new_group(backend="gloo")
    model, optimizer = initialized(size)
    epoch = agree_on_epoch()
    step = load_newest(model, optimizer)
    dataset = Recorded()
    saved: Any = None
    while step < STEPS:
        optimizer.zero_grad()
        batch, samples = read(dataset, step, rank, size)
        model(batch).backward()
        optimizer.step()
        step += 1
        record_step(DIRECTORY, rank, step, size, epoch, samples=samples)
        if step % CHECKPOINT_EVERY == 0:
            if saved is not None:
                saved.result()
                if rank == 0:
                    remove_all_but_two()
            weights, moments = get_state_dict(model, optimizer)
            saved = dcp.async_save(
                {"model": weights, "optimizer": moments, "step": step},
                checkpoint_id=DIRECTORY / "dcp" / f"{step:08}",
                process_group=saving,
            )


def complete_checkpoints() -> list[Path]:
    """Return DCP's checkpoints, oldest first; the metadata of each is written last."""
    return sorted(path.parent for path in (DIRECTORY / "dcp").glob("*/.metadata"))


def remove_all_but_two() -> None:
    for path in complete_checkpoints()[:-2]:
        shutil.rmtree(path, ignore_errors=True)


def load_newest(model: GPT, optimizer: AdamW) -> int:
    """Load the newest checkpoint on all ranks; return its step, 0 without one."""
    complete = complete_checkpoints()
    newest = torch.tensor([int(complete[-1].name) if complete else 0])
    dist.broadcast(newest, src=0)
    step = int(newest.item())
    if step == 0:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=DIRECTORY / "dcp" / f"{step:08}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return step


def run_keepstep() -> None:
    import keepstep

    def build(world: keepstep.World) -> keepstep.State:
        model = sharded_model(world.mesh["dp"])
        return keepstep.State(
            model, functools.partial(AdamW, lr=LEARNING_RATE), initialize=initialize
        )

    dataset = Recorded()
    checkpoint = str(DIRECTORY / "checkpoint")
    with keepstep.join(build, checkpoint=checkpoint, checkpoint_every=100) as job:
        batches = job.batches(dataset, GLOBAL_BATCH, steps=STEPS, shuffle=False)
        while True:
            dataset.indices.clear()
            batch = next(batches)
            samples = list(dataset.indices)
            with job.step():
                job.model(batch).backward()
                job.optimizer.step()
                # Inside the step: a rank that is killed after it has recorded what was kept.
                world = job.world
                record_step(
                    DIRECTORY, world.rank, job.steps + 1, world.world_size, world.generation,
                    samples=samples,
                )  # fmt: skip


def run_torchft() -> None:
    """Train with torchft: four replica groups of one rank each, with the full model.

    The groups that take part in a step divide its batch.
    """
    group = ReplicaGroup()
    manager = group.manager
    dataset = Recorded()
    while manager.current_step() < STEPS:
        group.optimizer.zero_grad()
        before = manager.current_step()
        # The quorum, which `zero_grad` began, says who takes part in this step.
        manager.wait_quorum()
        rank, size = manager.participating_rank(), manager.num_participants()
        batch, samples = read(dataset, before, rank or 0, size)
        group.model(batch).backward()
        group.reduce_gradients()
        group.optimizer.step()
        if manager.current_step() == before + 1 and rank is not None:
            record_step(DIRECTORY, group.number, before + 1, size, 0, samples=samples)


if __name__ == "__main__":
    match MODE:
        case "torchrun":
            run_torchrun()
        case "keepstep":
            run_keepstep()
        case "torchft":
            run_torchft()
