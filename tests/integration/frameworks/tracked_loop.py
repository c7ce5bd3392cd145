"""A training script whose rank 0 logs each step's loss to W&B, MLflow and TensorBoard."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.tensorboard import SummaryWriter
from tracker import Tracker, WandbRecord

import keepstep
from keepstep.integrations.mlflow import mlflow, start_run

options = json.loads(sys.argv[1])
log = Path(options["log"])


class Trackers:
    """MLflow and TensorBoard, in the process that is rank 0."""

    def __init__(self) -> None:
        self.board: SummaryWriter | None = None

    def on_generation(self, entered: keepstep.GenerationEntered) -> None:
        if entered.rank != 0:
            return
        # One process holds rank 0 until it ends; it stays in later generations.
        if mlflow.active_run() is None:
            start_run(run_name="loop")
        if self.board is not None:
            self.board.close()
        self.board = SummaryWriter(str(log / "board"), purge_step=entered.step + 1)

    def write(self, step: int, loss: float) -> None:
        if self.board is None:
            return
        mlflow.log_metric("loss", loss, step=step)
        self.board.add_scalar("loss", loss, step)
        self.board.flush()
        with (log / "steps").open("a") as lines:
            print(step, file=lines)
        if step == options["killed_at"] and job.world.generation == 1:
            # The newest snapshot is that of step 6.
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
            mlflow.end_run()


def build(world: keepstep.World) -> keepstep.State:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    fully_shard(model, mesh=world.mesh["dp"])
    return keepstep.State(model, partial(torch.optim.AdamW, lr=1e-2), extra={"wandb": in_wandb})


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


def on_generation(entered: keepstep.GenerationEntered) -> None:
    trackers.on_generation(entered)
    in_wandb.on_generation(entered)


trackers = Trackers()
in_wandb = Tracker(WandbRecord(project="tests", dir=str(log)), keep=1000)
callbacks = keepstep.Callbacks(on_generation=on_generation, on_snapshot=in_wandb.on_snapshot)
with keepstep.join(build, seed=7, snapshot_every=3, callbacks=callbacks) as job:
    for batch in job.batches(Numbers(), 16, steps=options["steps"]):
        with job.step() as step:
            loss = (job.model(batch) - batch).square().mean() * step.loss_scale
            loss.backward()
            job.optimizer.step()
            mean = loss.detach() / job.world.world_size
            dist.all_reduce(mean)
            in_wandb.write(job.steps + 1, loss=mean.item())
            # A step that is lost together with its snapshot is logged, and computed again.
            trackers.write(job.steps + 1, mean.item())
        if not (log / "hurry").exists():
            time.sleep(0.3)
in_wandb.finish()
trackers.close()
