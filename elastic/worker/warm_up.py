"""Computes a step in advance, after which PyTorch's first one is faster.

The model is a small one that FSDP2 shards over one rank, alone in a process group of its own.
Afterwards the process is as it was: it has neither group nor mesh, what DTensor has cached of them
is dropped, no device was used, and no random number was drawn.
"""

from __future__ import annotations

import gc
import logging
import os
from typing import TYPE_CHECKING

from keepstep.elastic.worker.exception_hook import kept_hook

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("keepstep")

_MONITOR_VARIABLE = "KEEPSTEP_MONITOR"
_WIDTH = 8


def compute_step() -> None:
    """Build, shard and train a small model; without process groups, train one parameter."""
    # A recorder that starts with a process's first group would take this one for the job's.
    if not os.environ.get(_MONITOR_VARIABLE):
        try:
            _compute_sharded_step()
        except (AttributeError, ImportError, RuntimeError) as error:
            # Other versions of PyTorch may not have the private names below.
            log.debug("not warmed up for sharded models, the first step takes longer: %s", error)
        else:
            return
    _compute_plain_step()


def _compute_plain_step() -> None:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter])
    (parameter * 2).sum().backward()
    optimizer.step()


def _compute_sharded_step() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from keepstep import torch_internals

    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        with kept_hook():
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        _train(mesh)
        # A group lives as long as anything refers to it, and PyTorch keeps meshes in its caches.
        torch_internals.mesh_groups(mesh).clear()
        torch_internals.clear_sharding_caches()
        gc.collect()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # PyTorch names groups by this count, which failed attempts increase too; all ranks must
        # find the job's under one name.
        torch_internals.reset_group_count()


def _train(mesh: DeviceMesh) -> None:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        block = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH))
        model = nn.Sequential(nn.Embedding(_WIDTH, _WIDTH), block, nn.Linear(_WIDTH, _WIDTH))
    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(_WIDTH, dtype=torch.int64)
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
