"""Trains a small model by a loop that owns its objects, and attaches them to the job.

    keepstep run --nproc-per-node 2 examples/attach.py

Without the three lines that name `training` it is a script for torchrun.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import keepstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=192)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(2048, 16)
dataset = TensorDataset(inputs, inputs.sin())
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

training = keepstep.attach(model, optimizer, scheduler)
training.restore()

epochs = options.steps // (len(dataset) // 64)
sampler = training.batch_sampler(len(dataset), global_batch=64, epochs=epochs)
loader = DataLoader(dataset, batch_sampler=sampler)
for _ in range(epochs):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        training.step_done()
        if training.steps % 8 == 0 and dist.get_rank() == 0:
            print(f"step {training.steps}  loss {loss.item():.5f}", flush=True)
dist.destroy_process_group()
