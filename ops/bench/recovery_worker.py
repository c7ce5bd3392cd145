"""Runs one worker of recovery.py: the same model and batch for each contender.

`recovery_worker.py MODE DIRECTORY`
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

STEPS, GLOBAL_BATCH, CONTEXT = 100_000, 8, 128
CONFIG = GPTConfig(width=192, layers=4, heads=4, context=CONTEXT)
MODE, DIRECTORY = sys.argv[1], Path(sys.argv[2])


def record_step(rank: int, step: int, world_size: int, epoch: int) -> None:
    line = {
        "rank": rank, "step": step, "world_size": world_size, "epoch": epoch,
        "pid": os.getpid(), "at_s": time.monotonic(),
    }  # fmt: skip
    with (DIRECTORY / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def batch_of(dataset: Windows, step: int, rank: int, world_size: int) -> Any:
    share = GLOBAL_BATCH // world_size
    begin = step * GLOBAL_BATCH + rank * share
    return torch.utils.data.default_collate(
        [dataset[index % len(dataset)] for index in range(begin, begin + share)]
    )


def run_plain(*, saving: bool) -> None:
    """Train with FSDP2 under torchrun; with `saving`, save each rank's shard after every step."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    tcp_store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    # Without a prefix a restart reads the last attempt's addresses from torchrun's store, and
    # fails.
    store = dist.PrefixStore(f"attempt-{attempt}", tcp_store)
    dist.init_process_group(
        "gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.device("meta"):
        model = GPT(CONFIG)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    initialize(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    # Distinguishes the incarnations of this job; it is equal on all ranks.
    start_s = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.broadcast(start_s, src=0)
    step = resume(model, optimizer, rank, world_size) if saving else 0
    dataset = Windows(standard_library(), CONTEXT)
    while step < STEPS:
        optimizer.zero_grad()
        model(batch_of(dataset, step, rank, world_size)).backward()
        optimizer.step()
        step += 1
        if saving:
            path = DIRECTORY / f"shard-{world_size}-{rank}-{step % 2}.pt"
            parameters = dict(model.named_parameters())
            state = {
                "step": step,
                "model": {name: local(parameter) for name, parameter in parameters.items()},
                "optimizer": {
                    name: {slot: local(value) for slot, value in optimizer.state[parameter].items()}
                    for name, parameter in parameters.items()
                },
            }
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        record_step(rank, step, world_size, int(start_s.item() * 1000))


def resume(model: torch.nn.Module, optimizer: AdamW, rank: int, world_size: int) -> int:
    """Load the newest step that all ranks have saved for this world size; return it, 0 for none."""
    paths = {}
    for path in DIRECTORY.glob(f"shard-{world_size}-{rank}-?.pt"):
        paths[torch.load(path, weights_only=False)["step"]] = path
    steps = [torch.zeros(2, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(steps, torch.tensor([*sorted(paths), 0, 0][:2]))
    common = set.intersection(*(set(rank_steps.tolist()) for rank_steps in steps)) - {0}
    if not common:
        return 0
    state = torch.load(paths[max(common)], weights_only=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local(parameter).copy_(state["model"][name])
            optimizer.state[parameter] = {
                slot: DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                if value.dim()
                else value
                for slot, value in state["optimizer"][name].items()
            }
    return int(state["step"])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def run_keepstep() -> None:
    import keepstep

    def build(world: keepstep.World) -> keepstep.State:
        with torch.device("meta"):
            model = GPT(CONFIG)
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh["dp"])
        fully_shard(model, mesh=world.mesh["dp"])
        return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)

    dataset = Windows(standard_library(), CONTEXT)
    checkpoint = str(DIRECTORY / "checkpoint")
    with keepstep.join(build, checkpoint=checkpoint, checkpoint_every=25, snapshot_every=1) as job:
        for batch in job.batches(dataset, GLOBAL_BATCH, steps=STEPS, shuffle=False):
            with job.step() as step:
                job.model(batch).backward()
                job.optimizer.step()
            if step.completed:
                record_step(job.world.rank, job.steps, job.world.world_size, job.world.generation)


def run_torchft() -> None:
    """Train with torchft: four replica groups of one rank, each with the full model.

    torchft replicates the model over groups; it does not shard it over them.
    """
    from datetime import timedelta

    from torchft import Manager, Optimizer, ProcessGroupGloo

    group = int(os.environ["REPLICA_GROUP_ID"])
    # torchft expects a store of the group, as torchrun provides it.
    port = int(os.environ["MASTER_PORT"])
    own_store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    model = GPT(CONFIG)
    initialize(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"bench_{group}",
        timeout=timedelta(seconds=10),
    )
    managed = Optimizer(manager, optimizer)
    dataset = Windows(standard_library(), CONTEXT)
    while manager.current_step() < STEPS:
        managed.zero_grad()
        model(batch_of(dataset, manager.current_step(), group, 4)).backward()
        # torchft 0.2's DDP hook does not work with this PyTorch; one reduction of all gradients
        # replaces it.
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(flat).wait()
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        managed.step()
        record_step(group, manager.current_step(), manager.num_participants(), 0)
    del own_store


if __name__ == "__main__":
    match MODE:
        case "plain":
            run_plain(saving=False)
        case "torchrun":
            run_plain(saving=True)
        case "keepstep":
            run_keepstep()
        case "torchft":
            run_torchft()
