"""The process groups of one generation: how a worker finds its peers, and how it lets go of them.

Everything that differs between NCCL and gloo is here. Facts this relies on: gloo reports a peer's death within milliseconds
as a RuntimeError from whatever collective is under way; NCCL reports nothing until its communicators are aborted, and once
one rank aborts all must (`abort` is therefore called on every rank that hears that a generation closes).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group

from elastic.errors import UsageError
from elastic.session import Assignment

_CONNECT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class World:
    """One generation as the training code sees it.

    `mesh` has the dimensions asked for in `elastic.join(mesh=...)`, by default one, `dp`. `data_rank` and `data_size` say which
    share of each global batch this rank computes: ranks that differ only in dimensions other than `dp*` share their samples.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    data_rank: int
    data_size: int




def mesh_sizes(wanted: Mapping[str, int], world_size: int) -> tuple[int, ...]:
    """Return the mesh's dimensions for this world size; at most one is -1, which takes what the others leave.

    Raises:
        UsageError: the world size does not factor so.
    """
    fixed = 1
    for size in wanted.values():
        fixed *= size if size > 0 else 1
    free = [name for name, size in wanted.items() if size == -1]
    if len(free) > 1 or any(size == 0 or size < -1 for size in wanted.values()):
        raise UsageError(f"mesh {dict(wanted)}: sizes are positive, and at most one is -1")
    if world_size % fixed != 0 or (not free and fixed != world_size):
        raise UsageError(
            f"mesh {dict(wanted)} does not divide {world_size} ranks; change --nnodes or the mesh, "
            "or leave one dimension -1"
        )
    return tuple(world_size // fixed if size == -1 else size for size in wanted.values())


def enter_world(assignment: Assignment, mesh: Mapping[str, int]) -> World:
    """Join the process group of a generation and lay the mesh over it.

    Raises:
        UsageError: the mesh does not fit the world size.
        RuntimeError: a peer died meanwhile (as torch reports it).
    """
    sizes = mesh_sizes(mesh, assignment.world_size)
    device = _bind_device(assignment.local_rank)
    if device.type == "cuda":
        # Recovery outlasts NCCL's own watchdog, which would kill the process in the middle of it.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    store = dist.TCPStore(
        assignment.store_host, assignment.store_port, is_master=False, timeout=_CONNECT_TIMEOUT
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"generation-{assignment.generation}", store),
        rank=assignment.rank,
        world_size=assignment.world_size,
        device_id=device if device.type == "cuda" else None,
    )
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(mesh))
    data_rank, data_size = _data_share(device_mesh, tuple(mesh))
    return World(
        assignment.generation,
        assignment.rank,
        assignment.world_size,
        assignment.local_rank,
        device,
        device_mesh,
        data_rank,
        data_size,
    )


def abort() -> None:
    """Break off collectives under way, so that a thread blocked in one gets an error. Safe from any thread.

    gloo has nothing to abort: there, a blocked thread is woken by its peers closing their connections.
    """
    if dist.is_initialized() and dist.get_backend().endswith("nccl"):
        _abort_process_group()


def leave_world() -> None:
    """Let go of all process groups, whatever state they are in; peers that still wait get an error."""
    if not dist.is_initialized():
        return
    if "nccl" in str(dist.get_backend_config()):
        _abort_process_group()
    else:
        dist.destroy_process_group()


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception of the training step looks like the failure of another rank or of the network."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text or "TCPStore" in text)


def _bind_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _data_share(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[int, int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh of all ranks"
    data_rank, data_size = 0, 1
    for position, name in enumerate(names):
        if name.startswith("dp"):
            size = mesh.size(position)
            data_rank = data_rank * size + coordinate[position]
            data_size *= size
    return data_rank, data_size
