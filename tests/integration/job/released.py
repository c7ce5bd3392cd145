"""A training script that fails to build a model while the one before is still in memory."""

import functools
import time
import weakref

import torch
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard

import keepstep

CONFIG = GPTConfig(width=32, layers=2, context=32, heads=2)
models: list[weakref.ref[torch.nn.Module]] = []


def build(world: keepstep.World) -> keepstep.State:
    assert not [model for model in models if model() is not None], "the last model is in memory"
    with torch.device("meta"):
        model = GPT(CONFIG)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh["dp"])
    models.append(weakref.ref(fully_shard(model, mesh=world.mesh["dp"])))
    return keepstep.State(
        model, functools.partial(torch.optim.AdamW, lr=1e-3), initialize=initialize
    )


with keepstep.join(build) as job:
    windows = Windows(standard_library(), 32)
    for batch in job.batches(windows, global_batch=8, steps=10_000):
        with job.step():
            job.model(batch).backward()
            job.optimizer.step()
        time.sleep(0.05)
        if job.world.generation > 1:
            job.stop()
