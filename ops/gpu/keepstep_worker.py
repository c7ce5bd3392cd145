"""One worker of a check's job: `keepstep_worker.py DIRECTORY KIND STEPS`, by `keepstep run`.

The model is whole on each rank (KIND `whole`), over gloo, or sharded by FSDP2 (`sharded`), over
what keepstep chooses: NCCL if there is a GPU.
"""

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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import keepstep

_DIRECTORY, _KIND, _STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
_WIDTH = 256


class Points:
    """Points whose values follow from their number."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(float(_WIDTH)) * (index + 1))


def build(world: keepstep.World) -> keepstep.State:
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 1))
    model.to(world.device)
    if _KIND == "sharded":
        fully_shard(model, mesh=world.mesh["dp"])
    return keepstep.State(model, functools.partial(torch.optim.AdamW, lr=1e-3))


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


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    torch.use_deterministic_algorithms(True)
    # Two ranks can use gloo on one GPU. A test runs this where there is none.
    whole = "cpu:gloo,cuda:gloo" if torch.cuda.is_available() else "gloo"
    backend = whole if _KIND == "whole" else None
    # A mesh of several dimensions has groups that are split from the default one.
    mesh = {"dp": -1, "tp": 1} if _KIND == "sharded" else None
    with keepstep.join(build, backend=backend, mesh=mesh) as job:
        for points in job.batches(Points(), global_batch=16, steps=_STEPS):
            with job.step() as step:
                job.model(points.to(job.world.device)).square().mean().backward()
                if _KIND == "whole":
                    average_gradients(job.model, job.world.world_size)
                job.optimizer.step()
            if step.completed:
                write(f"rank-{job.world.rank}.json", {"step": job.steps, "process": os.getpid()})
        parameters = [whole_of(parameter.detach()) for parameter in job.model.parameters()]
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
                    "backend": dist.get_backend_config(),
                },
            )


if __name__ == "__main__":
    main()
