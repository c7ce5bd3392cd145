"""Shards within groups of ranks and copies between them: HSDP.

`keepstep run --nproc-per-node 4 examples/layouts/hsdp.py`

The mesh is a rule: an odd number of ranks is sharded in one group.
"""

import functools

import click
import torch
from fsdp2 import shard
from torch.optim import AdamW
from transformer import Config, Sequences, Transformer, initialize, loss_of, report

import keepstep

config = Config()


def mesh(ranks: int) -> dict[str, int]:
    """Return the sizes of the mesh for a number of ranks."""
    replicas = 2 if ranks % 2 == 0 else 1
    return {"dp_replicate": replicas, "dp_shard": ranks // replicas}


def build(world: keepstep.World) -> keepstep.State:
    with torch.device("meta"):
        model = Transformer(config)
    # Over two dimensions, FSDP2 copies along the first and shards along the second.
    shard(model, world.mesh["dp_replicate", "dp_shard"])
    return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)


@click.command()
@click.option("--steps", default=100)
def main(steps: int) -> None:
    with keepstep.join(build, mesh=mesh) as job:
        for inputs, targets in job.batches(Sequences(config), global_batch=16, steps=steps):
            with job.step() as step:
                loss = loss_of(job.model(inputs), targets)
                (loss * step.loss_scale).backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0:
                report(job, loss)


if __name__ == "__main__":
    main()
