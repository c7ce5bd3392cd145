"""Trains by a loop with Accelerate, and resumes from its newest checkpoint."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from ops.bench.frameworks.plan import EPOCHS, GLOBAL_BATCH, SAVE_EVERY
from ops.bench.frameworks.workload import DIRECTORY, Model, Rows

torch.manual_seed(0)
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
)
dataset = Rows()
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
loader = DataLoader(dataset, GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(scheduler)

step = 0
for stored in sorted(DIRECTORY.glob("step-*"), key=lambda path: path.stat().st_mtime)[-1:]:
    accelerator.load_state(str(stored))
    step = int(stored.name.removeprefix("step-"))

for epoch in range(step // len(loader), EPOCHS):
    left = accelerator.skip_first_batches(loader, step % len(loader))
    left.set_epoch(epoch)
    for batch in left:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if step % SAVE_EVERY == 0:
            accelerator.save_state(str(DIRECTORY / f"step-{step}"))
accelerator.end_training()
