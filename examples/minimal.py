"""Trains a small model through failures: `keepstep run --nproc-per-node 2 examples/minimal.py`."""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import keepstep

inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, inputs.sin())


def build(world: keepstep.World) -> keepstep.State:  # called for every new membership
    torch.manual_seed(0)
    with world.device:
        model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16))
    fully_shard(model, mesh=world.mesh["dp"])
    return keepstep.State(model, functools.partial(torch.optim.AdamW, lr=1e-3))


with keepstep.join(build) as job:  # checkpoint="s3://bucket/run7", checkpoint_every=500
    for batch in job.batches(dataset, global_batch=64, steps=500):
        with job.step() as step:  # a peer's failure ends here; the batch is repeated
            x, y = (tensor.to(job.world.device) for tensor in batch)
            loss = nn.functional.mse_loss(job.model(x), y) * step.loss_scale
            loss.backward()
            job.optimizer.step()
        if step.completed and job.world.rank == 0 and job.steps % 10 == 0:
            print(f"step {job.steps}  loss {loss.item():.5f}", flush=True)
