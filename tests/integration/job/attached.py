"""A training script that owns its model, and records each step's samples and exact loss."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import keepstep

options = json.loads(sys.argv[1])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(16, generator=generator)


class Average:
    """A running average of the weights, with their sharding."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = dict(state)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.Dropout(options["dropout"]), nn.ReLU(), nn.Linear(64, 16)
)
fully_shard(model)
average = Average(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
scaler = torch.amp.GradScaler("cpu", growth_interval=3)
# Other draws than those of the state that is restored.
torch.rand(3)

training = keepstep.attach(
    model,
    optimizer,
    scheduler,
    extra={"average": average, "scaler": scaler},
    checkpoint=options.get("checkpoint"),
    seed=7,
)
training.restore()
# torchrun does not count all of them.
generation = training._assignment.generation
sampler = training.batch_sampler(len(Numbers()), 16, epochs=options["epochs"])
loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=options.get("workers", 0))
with (Path(options["log"]) / f"rank-{rank}.{os.getpid()}.jsonl").open("a") as log:
    for _ in range(options["epochs"]):
        for indices, inputs in loader:
            losses = []
            for half in inputs.chunk(2):
                loss = (model(half) - half).square().mean() * sampler.loss_scale / 2
                scaler.scale(loss).backward()
                losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            average.update(model)
            training.step_done()
            line = {
                "step": training.steps,
                "generation": generation,
                "rank": rank,
                "samples": indices.tolist(),
                "loss": sum(losses).hex(),
                "world_size": world_size,
                "scale": scaler.get_scale(),
            }
            print(json.dumps(line), file=log, flush=True)
            if training.steps == options.get("stop_at"):
                sys.exit(0)
            if not (Path(options["log"]) / "hurry").exists():
                time.sleep(options.get("pause_s", 0.0))
if options.get("finishes"):
    training.finish()
# As PyTorch asks for; in a job of `keepstep run` the last step is made safe after it.
dist.destroy_process_group()
