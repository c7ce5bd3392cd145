"""Runs one worker of recovery.py: the same model and batch for each contender.

`recovery_worker.py MODE DIRECTORY`
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import initialize
from text import Windows, standard_library
from torch.distributed.tensor import DTensor
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

STEPS = 100_000
MODE, DIRECTORY = sys.argv[1], Path(sys.argv[2])


def batch_of(dataset: Windows, step: int, rank: int, world_size: int) -> Any:
    share = GLOBAL_BATCH // world_size
    begin = step * GLOBAL_BATCH + rank * share
    return torch.utils.data.default_collate(
        [dataset[index % len(dataset)] for index in range(begin, begin + share)]
    )


def run_plain(*, saving: bool) -> None:
    """Train with FSDP2 under torchrun; with `saving`, save each rank's shard after every step."""
    rank, world_size = join_torchrun(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
    model, optimizer = initialized(world_size)
    epoch = agree_on_epoch()
    step = resume(model, optimizer, rank, world_size) if saving else 0
    dataset = Windows(standard_library(), CONTEXT)
    while step < STEPS:
        optimizer.zero_grad()
        model(batch_of(dataset, step, rank, world_size)).backward()
        optimizer.step()
        step += 1
        if saving:
            path = DIRECTORY / f"shard-{world_size}-{rank}-{step % 2}.pt"
            parameters = dict(model.named_parameters())
            state = {
                "step": step,
                "model": {name: local(parameter) for name, parameter in parameters.items()},
                "optimizer": {
                    name: {slot: local(value) for slot, value in optimizer.state[parameter].items()}
                    for name, parameter in parameters.items()
                },
            }
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        record_step(DIRECTORY, rank, step, world_size, epoch)


def resume(model: torch.nn.Module, optimizer: AdamW, rank: int, world_size: int) -> int:
    """Load the newest step that all ranks have saved for this world size; return it, 0 for none."""
    paths = {}
    for path in DIRECTORY.glob(f"shard-{world_size}-{rank}-?.pt"):
        paths[torch.load(path, weights_only=False)["step"]] = path
    steps = [torch.zeros(2, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(steps, torch.tensor([*sorted(paths), 0, 0][:2]))
    common = set.intersection(*(set(rank_steps.tolist()) for rank_steps in steps)) - {0}
    if not common:
        return 0
    state = torch.load(paths[max(common)], weights_only=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local(parameter).copy_(state["model"][name])
            optimizer.state[parameter] = {
                slot: DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                if value.dim()
                else value
                for slot, value in state["optimizer"][name].items()
            }
    return int(state["step"])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def run_keepstep() -> None:
    import keepstep

    def build(world: keepstep.World) -> keepstep.State:
        model = sharded_model(world.mesh["dp"])
        return keepstep.State(
            model, functools.partial(AdamW, lr=LEARNING_RATE), initialize=initialize
        )

    dataset = Windows(standard_library(), CONTEXT)
    checkpoint = str(DIRECTORY / "checkpoint")
    with keepstep.join(build, checkpoint=checkpoint, checkpoint_every=25, snapshot_every=1) as job:
        for batch in job.batches(dataset, GLOBAL_BATCH, steps=STEPS, shuffle=False):
            with job.step() as step:
                job.model(batch).backward()
                job.optimizer.step()
            if step.completed:
                world = job.world
                record_step(DIRECTORY, world.rank, job.steps, world.world_size, world.generation)


def run_torchft() -> None:
    """Train with torchft: four replica groups of one rank each, with the full model."""
    group = ReplicaGroup()
    manager = group.manager
    dataset = Windows(standard_library(), CONTEXT)
    while manager.current_step() < STEPS:
        group.optimizer.zero_grad()
        group.model(batch_of(dataset, manager.current_step(), group.number, 4)).backward()
        group.reduce_gradients()
        group.optimizer.step()
        step, size = manager.current_step(), manager.num_participants()
        record_step(DIRECTORY, group.number, step, size, 0)


if __name__ == "__main__":
    match MODE:
        case "plain":
            run_plain(saving=False)
        case "torchrun":
            run_plain(saving=True)
        case "keepstep":
            run_keepstep()
        case "torchft":
            run_torchft()
