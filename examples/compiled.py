"""Trains a compiled GPT with FSDP2, through failures of workers and nodes.

`keepstep run --nproc-per-node 2 examples/compiled.py --steps 200`

Code compiled for a generation's process groups is dropped with them and compiled again for the next
ones, mostly from TorchInductor's cache. A C++ compiler is needed on CPUs.
"""

from __future__ import annotations

import functools

import click
import torch
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import keepstep


@click.command()
@click.option("--steps", default=100)
@click.option("--global-batch", default=8)
@click.option("--width", default=64)
@click.option("--layers", default=2)
@click.option("--backend", default="inductor", help="Of torch.compile.")
def main(steps: int, global_batch: int, width: int, layers: int, backend: str) -> None:
    def build(world: keepstep.World) -> keepstep.State:
        with torch.device("meta"):
            model = GPT(GPTConfig(width=width, layers=layers, context=64))
        for block in model.blocks:
            # In place, so that names stay; FSDP's hooks are outside the compiled code.
            block.compile(backend=backend, fullgraph=True)
            fully_shard(block, mesh=world.mesh["dp"])
        fully_shard(model, mesh=world.mesh["dp"])
        return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)

    with keepstep.join(build) as job:
        for batch in job.batches(Windows(standard_library(), 64), global_batch, steps=steps):
            with job.step() as step:
                loss = job.model(batch) * step.loss_scale
                loss.backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0 and job.steps % 10 == 0:
                print(f"step {job.steps}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
