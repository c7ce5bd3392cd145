"""Trains a small model by a loop written for Accelerate, and records each step."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from fsdp2_on_cpus import shard_on_cpus
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset

from keepstep.integrations.accelerate import attach

options = json.loads(sys.argv[1])
log = Path(options["log"])
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index))


class Counter:
    """Is registered with Accelerate."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


torch.manual_seed(0)
plugin = None
if "fsdp2" in options:
    PartialState(cpu=True)
    shard_on_cpus()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options["fsdp2"])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
dataset = Numbers()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
counter = Counter()
accelerator.register_for_checkpointing(counter)

model, optimizer = accelerator.prepare(model, optimizer)
assert isinstance(model, FSDPModule) == ("fsdp2" in options)
training = attach(accelerator, scheduler=scheduler)
training.restore()
sampler = training.batch_sampler(len(dataset), global_batch=8, epochs=options["epochs"])
loader = DataLoader(dataset, batch_sampler=sampler)

path = log / f"rank-{accelerator.process_index}.{os.getpid()}.jsonl"
read: list[int] = []
losses: list[float] = []
for _ in range(options["epochs"]):
    for indices, batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch), batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        read += indices.tolist()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            scheduler.step()
            counter.samples += 16
            training.step_done(batches=2)
            line = {
                "step": training.steps,
                "generation": generation,
                "rank": accelerator.process_index,
                "samples": read,
                "loss": sum(losses).hex(),
                "rate": scheduler.get_last_lr(),
                "counted": counter.samples,
                "world_size": accelerator.num_processes,
            }
            with path.open("a") as file:
                print(json.dumps(line), file=file)
            read, losses = [], []
            if not (log / "hurry").exists():
                time.sleep(options.get("pause_s", 0.0))
