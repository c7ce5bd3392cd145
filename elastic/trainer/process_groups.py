"""Enters, aborts and leaves the process groups of one generation.

All differences between NCCL and gloo are handled here. The module relies on these facts. gloo
reports a peer's death within milliseconds as a RuntimeError of the collective in progress, but has
no abort, and keeps its connections as long as any object (a model, a loss) refers to the group; so
this module shuts the connections down, which wakes this rank and its peers. NCCL reports nothing
until its communicators are aborted, and once one rank aborts all must: `abort` is called on every
rank that receives the closing of a generation because of a failure.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group, _world
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from keepstep.elastic.errors import UsageError
from keepstep.elastic.worker.messages import Assignment

_CONNECT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One generation as the training code sees it.

    `mesh` has the dimensions given to `keepstep.join(mesh=...)`, by default only `dp`. This rank
    computes share `data_rank` of the `data_size` shares of each global batch: ranks that differ
    only in dimensions other than `dp*` compute the same share.
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
    """Return the sizes of the mesh's dimensions for a world size.

    Args:
        wanted: size by name; at most one is -1: the quotient of `world_size` by the others.
        world_size: number of ranks, which the product of the sizes must equal.

    Raises:
        UsageError: a size is invalid, or the product of the sizes cannot equal the world size.
    """
    fixed = math.prod(size for size in wanted.values() if size > 0)
    free = [name for name, size in wanted.items() if size == -1]
    if len(free) > 1 or any(size == 0 or size < -1 for size in wanted.values()):
        raise UsageError(f"mesh {dict(wanted)}: sizes must be positive, and at most one may be -1")
    if world_size % fixed != 0 or (not free and fixed != world_size):
        raise UsageError(
            f"mesh {dict(wanted)} does not divide {world_size} ranks; change --nnodes or the mesh, "
            "or leave one dimension -1"
        )
    return tuple(world_size // fixed if size == -1 else size for size in wanted.values())


class ProcessGroups:
    """The process groups of this process. One world at most is entered at a time, until `leave`.

    Args:
        backend: back ends as `init_process_group` takes them; None: NCCL where there are GPUs, and
            gloo.
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self._connections: frozenset[tuple[int, str]] = frozenset()

    @property
    def awaits_abort_order(self) -> bool:
        """Whether an aborted collective may return garbage, here or at a peer, and not raise.

        With gloo it raises. NCCL's kernels return, and what is queued after them runs.
        """
        names = (part.rpartition(":")[2] for part in self._backend.split(","))
        return any(name != "gloo" for name in names)

    def enter(self, assignment: Assignment, mesh: Mapping[str, int]) -> World:
        """Join the process group of a generation and create its device mesh.

        Raises:
            UsageError: the mesh does not fit the world size.
            RuntimeError: a peer died during the call (raised by torch).
        """
        sizes = mesh_sizes(mesh, assignment.world_size)
        device = _bind_device(assignment.local_rank)
        if device.type == "cuda":
            # Recovery may take longer than NCCL's watchdog allows, which would kill the process.
            os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        sockets_before = _open_sockets()
        try:
            store = TCPStore(
                assignment.store_host,
                assignment.store_port,
                is_master=False,
                timeout=_CONNECT_TIMEOUT,
            )
            dist.init_process_group(
                self._backend,
                store=PrefixStore(f"generation-{assignment.generation}", store),
                rank=assignment.rank,
                world_size=assignment.world_size,
                device_id=device if device.type == "cuda" else None,
            )
            device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(mesh))
        finally:
            self._connections = _open_sockets() - sockets_before
        data_rank, data_size = _data_share(device_mesh, tuple(mesh))
        return World(
            generation=assignment.generation,
            rank=assignment.rank,
            world_size=assignment.world_size,
            local_rank=assignment.local_rank,
            device=device,
            mesh=device_mesh,
            data_rank=data_rank,
            data_size=data_size,
        )

    def abort(self) -> None:
        """Abort collectives in progress on this rank and its peers: blocked threads get an error.

        May be called from any thread.
        """
        if not dist.is_initialized():
            return
        if "nccl" in str(dist.get_backend_config()):
            _abort_process_group()
        connections, self._connections = self._connections, frozenset()
        for descriptor, name in connections:
            _shut_down(descriptor, name)

    def leave(self) -> None:
        """Destroy all process groups in any state; peers that wait in a collective get an error."""
        # DTensor caches specs by mesh. Meshes of equal shape compare equal even if this process has
        # another rank in each: after a change of rank it would silently use its old coordinates.
        _clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()
        self.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch names a group by this count, which failed attempts increase too: without a reset a
        # new process would look for this rank in a group of another name.
        _world.group_count = 0


def check_mesh_position(name: str, tensor: torch.Tensor) -> None:
    """Check that a sharded tensor's mesh has this process's current rank at its coordinate.

    Args:
        name: the tensor's name, for the error message.
        tensor: any tensor; only a DTensor is checked.

    Raises:
        RuntimeError: the rank is another one; training would silently corrupt the state.
    """
    if not isinstance(tensor, DTensor):
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    mesh_rank = int(tensor.device_mesh.mesh[tuple(coordinate)])
    if mesh_rank != dist.get_rank():
        raise RuntimeError(
            f"{name} is sharded for rank {mesh_rank}, but this is rank {dist.get_rank()}: "
            "build() must create the model anew from the World that it receives"
        )


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception of a training step comes from the failure of a peer or the network."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "gloo" in text or "NCCL" in text or "TCPStore" in text
    )


def _bind_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _data_share(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[int, int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the mesh contains every rank"
    data_rank, data_size = 0, 1
    for position, name in enumerate(names):
        if name.startswith("dp"):
            size = mesh.size(position)
            data_rank = data_rank * size + coordinate[position]
            data_size *= size
    return data_rank, data_size


def _open_sockets() -> frozenset[tuple[int, str]]:
    """Return this process's sockets as (descriptor, inode name, which no later socket has)."""
    sockets = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # The descriptor of the listing itself.
        if name.startswith("socket:"):
            sockets.add((int(entry), name))
    return frozenset(sockets)


def _shut_down(descriptor: int, name: str) -> None:
    """Shut down a TCP connection that C++ code owns, if the descriptor still refers to it."""
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != name:
            return
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # The owner or the peer has closed it.
