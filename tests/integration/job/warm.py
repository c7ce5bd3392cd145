"""A training script that owns its model or has it built, and records each step's exact loss."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import keepstep

options = json.loads(sys.argv[1])
directory = Path(options["directory"])
log_path = directory / f"{os.environ['RANK']}.{os.getpid()}.jsonl"
STEPS = 24
RAISES_AT = None
ERROR = ValueError("the person who runs this mends it")


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def note(step: int, loss: float, total: float) -> None:
    line = {"step": step, "rank": dist.get_rank(), "loss": loss.hex(), "weights": total.hex()}
    with log_path.open("a") as log:
        print(json.dumps(line), file=log, flush=True)
    if (directory / "slow").exists() and step >= 12:
        time.sleep(1.0)


def begin(step: int) -> None:
    if step == RAISES_AT:
        raise ERROR


def weights(model: nn.Module) -> float:
    return sum(parameter.to_local().sum().item() for parameter in model.parameters())


def attached() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = keepstep.attach(model, optimizer, seed=7, **options.get("storage", {}))
    training.restore()
    sampler = training.batch_sampler(len(Numbers()), 16, epochs=STEPS // 4)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    for _ in range(STEPS // 4):
        for inputs in loader:
            begin(training.steps + 1)
            loss = (model(inputs) - inputs).square().mean() * sampler.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step_done()
            note(training.steps, loss.item(), weights(model))
    dist.destroy_process_group()


def build(world: keepstep.World) -> keepstep.State:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16))
    fully_shard(model, mesh=world.mesh["dp"])
    return keepstep.State(model, partial(torch.optim.AdamW, lr=1e-2))


def joined() -> None:
    with keepstep.join(build, seed=7) as job:
        for batch in job.batches(Numbers(), 16, epochs=STEPS // 4):
            with job.step() as step:
                begin(job.steps + 1)
                loss = (job.model(batch) - batch).square().mean() * step.loss_scale
                loss.backward()
                job.optimizer.step()
            if step.completed:
                note(job.steps, loss.item(), weights(job.model))


{"attach": attached, "join": joined}[options["way"]]()
