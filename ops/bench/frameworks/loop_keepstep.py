"""Trains by a loop of its own, and resumes from its newest checkpoint."""

from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import keepstep
from ops.bench.frameworks.plan import EPOCHS, GLOBAL_BATCH, SAVE_EVERY
from ops.bench.frameworks.workload import DIRECTORY, Model, Rows

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = Rows()
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)

step = 0
newest = DIRECTORY / "newest.pt"
if newest.exists():
    state = torch.load(newest)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])

training = keepstep.attach(model, optimizer, scheduler)
step = training.restore(step)

for epoch in range(step // len(loader), EPOCHS):
    sampler.set_epoch(epoch)
    for batch in islice(loader, step % len(loader), None):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        training.step_done()
        step += 1
        if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(state, newest.with_suffix(".part"))
            newest.with_suffix(".part").rename(newest)
dist.destroy_process_group()
