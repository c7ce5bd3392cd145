"""Splits each layer over two ranks, sequences included, and shards over the others: TP with FSDP.

`keepstep run --nproc-per-node 4 examples/layouts/tensor_parallel.py`
"""

import functools

import click
import torch
from fsdp2 import shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import AdamW
from transformer import Config, Sequences, Transformer, initialize, loss_of, report

import keepstep

config = Config()
# Between attention and MLP each rank has its part of every sequence, dimension 1.
WHOLE = {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
GATHER = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
LAYER = {
    "norm_attention": SequenceParallel(),
    "attention": GATHER,
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm_mlp": SequenceParallel(),
    "mlp": GATHER,
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


def parallelize(model: Transformer, tp: DeviceMesh) -> None:
    """Split each layer's heads and hidden units, and the sequences between them."""
    parallelize_module(model, tp, WHOLE)
    for layer in model.layers.values():
        parallelize_module(layer, tp, LAYER)


def build(world: keepstep.World) -> keepstep.State:
    with torch.device("meta"):
        model = Transformer(config)
    parallelize(model, world.mesh["tp"])
    shard(model, world.mesh["dp"])
    return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)


@click.command()
@click.option("--steps", default=100)
def main(steps: int) -> None:
    with keepstep.join(build, mesh={"dp": -1, "tp": 2}) as job:
        # Both ranks of `tp` get the same samples.
        for inputs, targets in job.batches(Sequences(config), global_batch=16, steps=steps):
            with job.step() as step:
                loss = loss_of(job.model(inputs), targets)
                (loss * step.loss_scale).backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0:
                report(job, loss)


if __name__ == "__main__":
    main()
