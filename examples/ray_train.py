"""Trains under Ray Train, with checkpoints that any number of workers resumes from.

`python examples/ray_train.py --checkpoint file:///tmp/run --workers 1:2`

Ray starts the workers again when one dies, as many as there is room for between the two numbers.
Training goes on after the newest checkpoint, whatever the number of workers that saved it.
"""

from __future__ import annotations

from typing import Any

import click
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep import checkpoint

BATCH = 64  # samples of a step over all workers
WIDTH = 32


def share(step: int, rank: int, world: int) -> torch.Tensor:
    """Return a worker's share of a step's samples, which depend on the step alone."""
    samples = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return samples.chunk(world)[rank]


def initialized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor
) -> torch.Tensor:
    loss = (model(samples) - samples).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(config: dict[str, Any]) -> None:
    """Train from the newest checkpoint on; every worker calls this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = initialized()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    try:
        step = checkpoint.load(config["url"], state)
    except checkpoint.CheckpointMissing:
        step = 0
    while step < config["steps"]:
        loss = train_step(model, optimizer, share(step, rank, world))
        step += 1
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        if step % config["checkpoint_every"] == 0 or step == config["steps"]:
            checkpoint.save(config["url"], state, step=step)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.7f}, {world} workers")
            ray.train.report({"step": step, "loss": loss.item()})


@click.command()
@click.option("--checkpoint", "url", required=True, help="Where checkpoints are kept.")
@click.option("--workers", default="1:2", help="The smallest and the largest number of workers.")
@click.option("--steps", default=100)
@click.option("--checkpoint-every", default=10)
def main(url: str, workers: str, steps: int, checkpoint_every: int) -> None:
    """Train with Ray's workers."""
    least, most = map(int, workers.split(":"))
    trainer = TorchTrainer(
        train,
        train_loop_config={"url": url, "steps": steps, "checkpoint_every": checkpoint_every},
        scaling_config=ScalingConfig(num_workers=(least, most)),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
