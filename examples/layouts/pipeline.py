"""Puts layers on two ranks one after the other, and shards over the others: PP with FSDP.

`keepstep run --nproc-per-node 4 examples/layouts/pipeline.py --schedule Interleaved1F1B`

A zero bubble schedule computes gradients of weights later than FSDP takes them: there each rank has
a copy of its stages, and gradients are averaged by hand.
"""

import functools

import click
import torch
import torch.distributed as dist
from fsdp2 import shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformer import Config, Sequences, Transformer, initialize, loss_of, report

import keepstep

config = Config()
MICRO_BATCHES = 4


class Stages(nn.Module):
    """The stages of this rank as one module, in which parameters have the whole model's names."""

    def __init__(self, stages: list[Transformer]) -> None:
        super().__init__()
        for stage in stages:
            for name, child in stage.named_children():
                if name == "layers" and hasattr(self, "layers"):
                    self.layers.update(child.items())
                else:
                    self.add_module(name, nn.ModuleDict(child) if name == "layers" else child)


def pipeline(
    world: keepstep.World, config: Config, schedule: str, micro_batches: int = MICRO_BATCHES
) -> tuple[nn.Module, PipelineScheduleSingle | PipelineScheduleMulti]:
    """Return this rank's stages, sharded over `dp`, and their schedule."""
    kind = get_schedule_class(schedule)
    mesh = world.mesh["pp"]
    rank, ranks = mesh.get_local_rank(), mesh.size()
    # Some schedules give each rank two stages, one from each half of the model.
    count = ranks if issubclass(kind, PipelineScheduleSingle) else 2 * ranks
    depth = config.layers // count
    stages, parts = [], []
    for number in range(rank, count, ranks):
        with torch.device("meta"):
            part = Transformer(config, range(number * depth, (number + 1) * depth))
        if "dp" in world.mesh.mesh_dim_names and "ZeroBubble" not in schedule:
            shard(part, world.mesh["dp"])
        parts.append(part)
        stages.append(PipelineStage(part, number, count, world.device, group=mesh.get_group()))
    if issubclass(kind, PipelineScheduleSingle):
        return Stages(parts), kind(stages[0], micro_batches, loss_fn=loss_of)
    return Stages(parts), kind(stages, micro_batches, loss_fn=loss_of)


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of copies, where no FSDP has done it."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            parameter.grad /= mesh.size()


@click.command()
@click.option("--steps", default=100)
@click.option("--schedule", default="1F1B", help="Also Interleaved1F1B, InterleavedZeroBubble.")
def main(steps: int, schedule: str) -> None:
    def build(world: keepstep.World) -> keepstep.State:
        model, model.schedule = pipeline(world, config, schedule)
        return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)

    with keepstep.join(build, mesh={"pp": 2, "dp": -1}) as job:
        # All ranks of a pipeline get the same samples.
        for inputs, targets in job.batches(Sequences(config), global_batch=16, steps=steps):
            is_last = hasattr(job.model, "head")
            losses: list[torch.Tensor] = []
            with job.step() as step:
                if hasattr(job.model, "tokens"):
                    job.model.schedule.step(inputs, target=targets, losses=losses)
                else:
                    job.model.schedule.step(target=targets, losses=losses)
                average_gradients(job.model, job.world.mesh["dp"])
                job.optimizer.step()
            if step.completed and is_last and job.world.data_rank == 0:
                report(job, torch.stack(losses).mean())


if __name__ == "__main__":
    main()
