"""One worker of G10's jobs: `keepstep_worker.py DIRECTORY`, started by `keepstep run`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import keepstep

_STEPS = 400
_WIDTH = 256
_DIRECTORY = Path(sys.argv[1])


class Points:
    """Points whose values follow from their number."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(float(_WIDTH)) * (index + 1))


def build(world: keepstep.World) -> keepstep.State:
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 1))
    return keepstep.State(model.to(world.device), functools.partial(torch.optim.AdamW, lr=1e-3))


def write(name: str, content: dict[str, object]) -> None:
    """Write a file as a whole: the check reads it at any time."""
    unfinished = _DIRECTORY / f"{name}.{os.getpid()}"
    unfinished.write_text(json.dumps(content))
    unfinished.rename(_DIRECTORY / name)


def average_gradients(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    # Two ranks can use gloo on one GPU. A test runs this where there is none.
    backend = "cpu:gloo,cuda:gloo" if torch.cuda.is_available() else "gloo"
    with keepstep.join(build, backend=backend) as job:
        for points in job.batches(Points(), global_batch=16, steps=_STEPS):
            with job.step() as step:
                job.model(points.to(job.world.device)).square().mean().backward()
                average_gradients(job.model, job.world.world_size)
                job.optimizer.step()
            if step.completed:
                write(f"rank-{job.world.rank}.json", {"step": job.steps, "process": os.getpid()})
        parameters = [parameter.detach() for parameter in job.model.parameters()]
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(bytes(parameter.cpu().contiguous().view(torch.uint8).flatten().tolist()))
        if job.world.rank == 0:
            write(
                "end.json",
                {
                    "weights": digest.hexdigest(),
                    "generation": job.world.generation,
                    "world_size": job.world.world_size,
                    "device": str(parameters[0].device),
                },
            )


if __name__ == "__main__":
    main()
