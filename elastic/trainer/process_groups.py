"""The process groups of one generation: how a worker finds its peers, and how it lets go of them.

Everything that differs between NCCL and gloo is here. Facts this relies on: gloo reports a peer's death within milliseconds
as a RuntimeError from whatever collective is under way, but has no abort, and keeps its connections as long as anything (a
model, a loss) refers to the group; so they are shut down here by hand, which wakes this rank and its peers. NCCL reports
nothing until its communicators are aborted, and once one rank aborts all must: `abort` is called on every rank that hears
that a generation closes because something broke.
"""

from __future__ import annotations

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
from keepstep.elastic.worker.session import Assignment

_CONNECT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class World:
    """One generation as the training code sees it.

    `mesh` has the dimensions asked for in `keepstep.join(mesh=...)`, by default one, `dp`. `data_rank` and `data_size` say which
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


class ProcessGroups:
    """The process groups of this process. At most one world is entered at a time; `leave` lets go of it."""

    def __init__(self) -> None:
        self._connections: frozenset[tuple[int, str]] = frozenset()

    def enter(self, assignment: Assignment, mesh: Mapping[str, int]) -> World:
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
        before = _open_sockets()
        try:
            store = TCPStore(
                assignment.store_host,
                assignment.store_port,
                is_master=False,
                timeout=_CONNECT_TIMEOUT,
            )
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore(f"generation-{assignment.generation}", store),
                rank=assignment.rank,
                world_size=assignment.world_size,
                device_id=device if device.type == "cuda" else None,
            )
            device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(mesh))
        finally:
            self._connections = _open_sockets() - before
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

    def abort(self) -> None:
        """Break off collectives under way, here and at the peers, so that threads blocked in one get an error.

        Safe from any thread.
        """
        if not dist.is_initialized():
            return
        if "nccl" in str(dist.get_backend_config()):
            _abort_process_group()
        connections, self._connections = self._connections, frozenset()
        for descriptor, name in connections:
            _shut_down(descriptor, name)

    def leave(self) -> None:
        """Let go of all process groups, whatever state they are in; peers that still wait get an error."""
        # DTensor caches specs by mesh, and two meshes of one shape are equal whatever rank this process has in them: a rank
        # that has moved would silently go on with its old place.
        _clear_sharding_prop_cache()
        _gen_transform_infos.cache_clear()
        self.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        # An attempt that failed is counted all the same, and the count is the next group's name: a fresh peer would look for
        # this rank under another.
        _world.group_count = 0


def check_mesh_position(name: str, tensor: torch.Tensor) -> None:
    """Assert that a sharded tensor lies on a mesh of the present process group, in which this rank has its present place.

    Raises:
        RuntimeError: it does not; training on would corrupt the state silently.
    """
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if (
            coordinate is not None
            and int(tensor.device_mesh.mesh[tuple(coordinate)]) != dist.get_rank()
        ):
            raise RuntimeError(
                f"{name} is sharded as for rank {int(tensor.device_mesh.mesh[tuple(coordinate)])}, but this is rank "
                f"{dist.get_rank()}: build() must make the model anew from the World it is given"
            )


def is_peer_failure(error: BaseException) -> bool:
    """Whether an exception of the training step looks like the failure of another rank or of the network."""
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
    assert coordinate is not None, "every rank is in the mesh of all ranks"
    data_rank, data_size = 0, 1
    for position, name in enumerate(names):
        if name.startswith("dp"):
            size = mesh.size(position)
            data_rank = data_rank * size + coordinate[position]
            data_size *= size
    return data_rank, data_size


def _open_sockets() -> frozenset[tuple[int, str]]:
    """Return this process's sockets, as (descriptor, name that no later socket has)."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # The descriptor of the listing itself.
        if name.startswith("socket:"):
            found.add((int(entry), name))
    return frozenset(found)


def _shut_down(descriptor: int, name: str) -> None:
    """Shut down a TCP connection that C++ code owns, if the descriptor still is what it was."""
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != name:
            return
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # Closed meanwhile, by its owner or by the peer.
