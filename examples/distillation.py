"""Trains a small model to compute what a large, frozen one does, with FSDP2, through failures.

`keepstep run --nproc-per-node 2 examples/distillation.py --steps 500`

The teacher is not part of the state: nothing of it changes, so it costs no snapshot. Each
generation makes a new one, as `build` does with everything, and loads it from `--teacher`.
"""

from __future__ import annotations

import functools

import click
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import keepstep


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )


def initialize(model: nn.Module) -> None:
    torch.manual_seed(1)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


class Points:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(1.0, 17.0) * (index + 1))


@click.command()
@click.option("--steps", default=300)
@click.option("--global-batch", default=64)
@click.option(
    "--teacher", "teacher_url", help="Checkpoint of the teacher; default: random weights."
)
def main(steps: int, global_batch: int, teacher_url: str | None) -> None:
    teacher: nn.Module

    def build(world: keepstep.World) -> keepstep.State:
        nonlocal teacher
        teacher = network(128).requires_grad_(False)
        initialize(teacher)
        teacher.to(world.device).eval()
        fully_shard(teacher, mesh=world.mesh["dp"])
        if teacher_url is not None:
            keepstep.checkpoint.load(teacher_url, {"model": teacher}, strict=False)
        with torch.device("meta"):
            student = network(32)
        fully_shard(student, mesh=world.mesh["dp"])
        return keepstep.State(student, functools.partial(AdamW, lr=3e-3), initialize=initialize)

    with keepstep.join(build) as job:
        for points in job.batches(Points(), global_batch, steps=steps):
            with job.step() as step:
                points = points.to(job.world.device)
                with torch.no_grad():
                    wanted = teacher(points)
                loss = F.mse_loss(job.model(points), wanted) * step.loss_scale
                loss.backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0 and job.steps % 10 == 0:
                print(f"step {job.steps}  loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
