"""Claims that the memory of four nodes, one of them lost, is enough to resume in another layout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource
from tests.integration.checkpoint.servers import SECRET, Cluster
from tests.integration.checkpoint.test_layout_changes import (
    Block,
    full,
    reference,
    sharded,
    step_once,
)
from tests.ranks import run_ranks

NODES = 4


def everything(model: Block, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All parameters and slots, whole, on every rank."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter).detach().clone()
        for slot, value in optimizer.state[parameter].items():
            found[f"{name}/{slot}"] = full(value).clone()
    return found


def save(rank: int, root: str, layout: str, servers: Sequence[str], generation: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{root}/save", NODES), rank=rank, world_size=NODES
    )
    model = sharded(layout, reference())
    optimizer = step_once(model)
    held = everything(model, optimizer)
    if rank == 0:
        torch.save(held, f"{root}/held.pt")
    with contextlib.closing(SnapshotClient(servers[rank], SECRET)) as client:
        snapshotter = Snapshotter(client, generation, rank, torch.device("cpu"))
        live = LiveStateReader(model, [optimizer]).capture()
        snapshotter.start(3, live.tensors, live.documents)
        snapshotter.wait()
        snapshotter.close()
    dist.barrier()
    os._exit(0)


def load(
    rank: int, root: str, layout: str, world: int, holders: Sequence[Holder], generation: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{root}/load", world), rank=rank, world_size=world
    )
    torch.manual_seed(1)
    model = sharded(layout, Block())
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1.0)
    source = MemorySource(SnapshotId(generation, 3), holders, SECRET, rank=rank)
    with contextlib.closing(source):
        allocate(model, [optimizer], source)
        fill(plan_fills(LiveStateReader(model, [optimizer]).capture(), source), source)
        restore_options(model, [optimizer], source.documents)
    held = torch.load(f"{root}/held.pt")
    got = everything(model, optimizer)
    assert got.keys() == held.keys()
    for name, value in held.items():
        assert torch.equal(got[name], value), name
    assert optimizer.param_groups[0]["lr"] == 0.1
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(
    ("saved", "loaded", "world", "lost"),
    [("fsdp", "fsdp", 3, 2), ("fsdp", "fsdp+tp", 4, 0), ("fsdp+tp", "fsdp", 3, None)],
)
def test_memory_resumes_in_another_layout(
    tmp_path: Path, saved: str, loaded: str, world: int, lost: int | None
) -> None:
    cluster = Cluster(tmp_path, NODES, 1)
    with contextlib.closing(cluster):
        generation = cluster.begin(1)
        addresses = [server.address for server in cluster.living]
        local = [server.local for server in cluster.living]
        run_ranks(save, args=(str(tmp_path), saved, local, generation), nprocs=NODES)
        cluster.commit(3)
        if lost is not None:
            cluster.kill(lost)
        holders = cluster.rebuild(3, addresses)
        run_ranks(load, args=(str(tmp_path), loaded, world, holders, generation), nprocs=world)
