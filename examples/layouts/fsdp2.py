"""Shards parameters, gradients and optimizer state over all ranks: FSDP2.

`keepstep run --nproc-per-node 4 examples/layouts/fsdp2.py`
"""

import functools

import click
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from transformer import Config, Sequences, Transformer, initialize, loss_of, report

import keepstep

config = Config()


def shard(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """Shard each layer by itself, and the rest together."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def build(world: keepstep.World) -> keepstep.State:
    with torch.device("meta"):
        model = Transformer(config)
    shard(model, world.mesh)
    return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)


@click.command()
@click.option("--steps", default=100)
def main(steps: int) -> None:
    with keepstep.join(build, mesh={"dp_shard": -1}) as job:
        for inputs, targets in job.batches(Sequences(config), global_batch=16, steps=steps):
            with job.step() as step:
                loss = loss_of(job.model(inputs), targets)
                (loss * step.loss_scale).backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0:
                report(job, loss)


if __name__ == "__main__":
    main()
