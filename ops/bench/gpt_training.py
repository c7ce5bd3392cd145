"""Trains one GPT in the same way with every contender of goodput.py and recovery.py.

Their workers share the model, plain torch's process group and FSDP2, and torchft's manager with its
reduction. The workers run with `examples` on their path.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, initialize
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

GLOBAL_BATCH, CONTEXT = 8, 128
CONFIG = GPTConfig(width=192, layers=4, heads=4, context=CONTEXT)
LEARNING_RATE = 1e-3


def record_step(
    directory: Path, rank: int, step: int, world_size: int, epoch: int, **further: Any
) -> None:
    """Append a completed step to the file of its rank.

    Args:
        directory: of the ranks' files.
        rank: the rank.
        step: how many steps are done.
        world_size: the number of ranks.
        epoch: names the incarnation of the job.
        further: what else the line is to have.
    """
    line = {
        "rank": rank, "step": step, "world_size": world_size, "epoch": epoch,
        "pid": os.getpid(), "at_s": time.monotonic(), **further,
    }  # fmt: skip
    with (directory / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def join_torchrun(attempt: str, timeout: timedelta | None = None) -> tuple[int, int]:
    """Make the process group of a worker under torchrun; return the rank and the number of ranks.

    Args:
        attempt: prefix in torchrun's store; without one a restart reads the last attempt's
            addresses, and fails.
        timeout: of gloo's operations; None: PyTorch's own.
    """
    tcp_store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(attempt, tcp_store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return rank, size


def agree_on_epoch() -> int:
    """Return a number of this incarnation of the job, which is equal on all ranks."""
    start_s = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.broadcast(start_s, src=0)
    return int(start_s.item() * 1000)


def sharded_model(mesh: DeviceMesh) -> GPT:
    """Return the model, sharded by FSDP2, without memory yet."""
    with torch.device("meta"):
        model = GPT(CONFIG)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def initialized(size: int) -> tuple[GPT, AdamW]:
    """Return the sharded model with its first weights, and its optimizer."""
    model = sharded_model(init_device_mesh("cpu", (size,)))
    model.to_empty(device="cpu")
    initialize(model)
    return model, AdamW(model.parameters(), lr=LEARNING_RATE)


class ReplicaGroup:
    """One of torchft's replica groups: a rank with the full model, over gloo.

    torchft replicates the model over groups; it does not shard it over them.
    """

    def __init__(self) -> None:
        from torchft import Manager, Optimizer, ProcessGroupGloo

        self.number = int(os.environ["REPLICA_GROUP_ID"])
        # torchft expects a store of the group, as torchrun provides it.
        self._store = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False
        )
        self.model = GPT(CONFIG)
        initialize(self.model)
        optimizer = AdamW(self.model.parameters(), lr=LEARNING_RATE)

        def load(state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
            load_state_dict=load,
            state_dict=lambda: {
                "model": self.model.state_dict(), "optimizer": optimizer.state_dict()
            },
            min_replica_size=1,
            replica_id=f"bench_{self.number}",
            timeout=timedelta(seconds=10),
        )  # fmt: skip
        self.optimizer = Optimizer(self.manager, optimizer)

    def reduce_gradients(self) -> None:
        """Reduce all gradients at once; torchft 0.2's DDP hook does not work with this PyTorch."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.manager.allreduce(flat).wait()
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
