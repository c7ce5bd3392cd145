"""Enters, aborts and leaves the process groups of one generation.

All differences between NCCL and gloo are handled here. The module relies on these facts. gloo
reports a peer's death within milliseconds as a RuntimeError of the collective in progress, but has
no abort, and keeps its connections as long as any object (a model, a loss) refers to the group; so
this module shuts the connections down, which wakes this rank and its peers. NCCL reports nothing
until its communicators are aborted, which raises nothing and may leave garbage, here and at peers:
`abort` is called on every rank of a generation that something broke, once the leader orders it. How
they are aborted is in `tear_down`.

`init_process_group(enable_reconfigure=True)` of PyTorch 2.14 and later is not used: a gloo group of
4 ranks takes 7 ms to make and 30 to reconfigure (medians, 2.14.1 and 2.15), and groups of two back
ends, as a job on GPUs has them, are refused.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from keepstep.elastic.errors import ProcessUnusable, UsageError
from keepstep.elastic.trainer.back_ends import known_back_end, list_ranks
from keepstep.elastic.trainer.devices import DeviceType, bind
from keepstep.elastic.trainer.mesh_rule import data_share, resolved
from keepstep.elastic.trainer.tear_down import GroupAbort, RetiredGroups, check_device
from keepstep.elastic.worker import telemetry
from keepstep.elastic.worker.exception_hook import RankPrefix
from keepstep.elastic.worker.messages import Assignment
from keepstep.torch_internals import (
    clear_sharding_caches,
    group_count,
    group_names,
    mesh_group_names,
    mesh_groups,
    reset_group_count,
)

_CONNECT_TIMEOUT = timedelta(seconds=60)
# keepstep decides when a collective has failed. PyTorch's own limit would also end a rank that
# waits for another one's long evaluation.
_COLLECTIVE_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One generation as the training code sees it.

    `mesh` has the dimensions given to `keepstep.join(mesh=...)`, in their order, by default only
    `dp`. Slices, and what `_flatten` and `_unflatten` make of it, are meshes of the same groups;
    `build` makes them again in each generation. This rank computes share `data_rank` of the
    `data_size` shares of each global batch: ranks that differ in a dimension whose name begins with
    `dp`, `fsdp`, `ep` or the like have different shares, and those that differ in others only
    (`cp`, `tp`, `pp`) the same.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    data_rank: int
    data_size: int

    @property
    def has_stages(self) -> bool:
        """Whether ranks have different parameters: those of the stages of a pipeline."""
        names = self.mesh.mesh_dim_names or ()
        return any(name.startswith("pp") for name in names)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is in a mesh."""

    rank: int
    sizes: tuple[int, ...]
    dimensions: tuple[str, ...]


class ProcessGroups:
    """The process groups of this process. One world at most is entered at a time, until `leave`.

    Args:
        device: the type of device that the job computes on.
        backend: back ends as `init_process_group` takes them; None: NCCL for GPUs, and gloo.
    """

    def __init__(self, device: DeviceType, backend: str | None = None) -> None:
        self._device_type = device
        self._device = torch.device("cpu")
        self._backend = backend or ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        self._changing = threading.Lock()
        self._connections: frozenset[tuple[int, str]] = frozenset()
        self._abort: GroupAbort | None = None
        self._can_be_rebuilt = True
        self._entered: tuple[_Place, DeviceMesh] | None = None
        self._kept: tuple[_Place, DeviceMesh] | None = None
        self._retired = RetiredGroups()
        self._rank_prefix = RankPrefix()

    @property
    def awaits_abort_order(self) -> bool:
        """Whether an aborted collective may return garbage, here or at a peer, and not raise.

        With gloo it raises. NCCL's kernels return, and what is queued after them runs.
        """
        names = (part.rpartition(":")[2] for part in self._backend.split(","))
        return any(name != "gloo" for name in names)

    def enter(self, assignment: Assignment, mesh: Mapping[str, int]) -> World:
        """Join the process group of a generation and create its device mesh.

        Args:
            assignment: this process's place in the generation.
            mesh: sizes of the mesh's dimensions by name, of which one may be -1.

        Raises:
            UsageError: the mesh does not fit the world size.
            DeviceUnavailable: this worker has no GPU.
            RuntimeError: a peer died during the call (raised by torch).
        """
        sizes = resolved(mesh, assignment.world_size)
        if sizes is None:
            raise UsageError(f"mesh {dict(mesh)} does not fit {assignment.world_size} ranks")
        place = _Place(assignment.rank, tuple(sizes.values()), tuple(sizes))
        self._device = device = bind(self._device_type, assignment.local_rank)
        is_cuda = device.type == "cuda"
        sockets_before = _open_sockets()
        try:
            store = TCPStore(
                assignment.store_host,
                assignment.store_port,
                is_master=False,
                timeout=_CONNECT_TIMEOUT,
            )
            with self._rank_prefix.replaced():
                dist.init_process_group(
                    self._backend,
                    store=PrefixStore(f"generation-{assignment.generation}", store),
                    rank=assignment.rank,
                    world_size=assignment.world_size,
                    device_id=device if is_cuda else None,
                    timeout=_COLLECTIVE_TIMEOUT if is_cuda else None,
                )
            group = dist.group.WORLD
            assert group is not None, "created above"
            list_ranks(group)
            device_mesh = self._mesh_of(place, group)
        finally:
            self._connections = _open_sockets() - sockets_before
        if is_cuda:
            self._can_be_rebuilt = known_back_end(group, device) is not None
            _connect_all(device)
        data_rank, data_size = data_share(sizes, assignment.rank)
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

    def _mesh_of(self, place: _Place, group: dist.ProcessGroup) -> DeviceMesh:
        """Return the mesh of a generation: the last one's if this process has the same place in it.

        DTensor caches specs by mesh. Meshes of equal shape compare equal even if this process has
        another rank in each: after a change of rank it would silently use its old coordinates. So
        the caches are cleared with the mesh. To fill them again takes as long as a small step.
        """
        kept, self._kept = self._kept, None
        if (
            kept is not None
            and kept[0] == place
            and mesh_group_names(kept[1]) == [group.group_name]
        ):
            mesh = kept[1]
            # Compiled code finds groups here, all other by their names.
            mesh_groups(mesh)[group.group_name] = group
        else:
            clear_sharding_caches()
            mesh = init_device_mesh(self._device.type, place.sizes, mesh_dim_names=place.dimensions)
        self._entered = (place, mesh)
        return mesh

    def _keep_mesh(self) -> None:
        """Keep the mesh for the next generation if it refers to the group of all ranks only."""
        entered, self._entered = self._entered, None
        # What is cached may refer to any group, and the next generation may name others so.
        if entered is not None and len(group_names()) == group_count() == 1:
            mesh_groups(entered[1]).clear()
            self._kept = entered

    def finish(self) -> None:
        """Wait until this rank and its peers have computed all that they have begun.

        For a generation that ends in good order: after it, an abort here leaves no garbage there.

        Raises:
            RuntimeError: a peer was lost before (raised by torch).
        """
        if not self.awaits_abort_order or not dist.is_initialized():
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Of the host, so by gloo, which reports a lost peer.
        dist.all_reduce(torch.zeros(1))

    def abort(self) -> None:
        """Begin to abort collectives in progress on this rank; `leave` waits for the end of it.

        Threads blocked in a collective of gloo get an error, here and at peers. May be called from
        any thread, and again.
        """
        with self._changing:
            if not dist.is_initialized():
                return
            connections, self._connections = self._connections, frozenset()
            if self._abort is None and self.awaits_abort_order:
                self._abort = GroupAbort(tuple(group_names()), self._device, telemetry.calls_inside)
        for descriptor, name in connections:
            _shut_down(descriptor, name)

    def leave(self) -> None:
        """Destroy all process groups in any state; peers that wait in a collective get an error.

        Whatever refers to the groups should have been dropped before, above all CUDA graphs.

        Raises:
            ProcessUnusable: the groups or the device cannot be used again in this process.
        """
        self._keep_mesh()
        self.abort()
        if self._abort is not None:
            self._abort.wait()
        # Also where no group was created: that may have failed for the device's sake.
        check_device(self._device)
        with self._changing:
            # An order to abort that comes later finds neither groups nor a former abort.
            if dist.is_initialized():
                if not self._can_be_rebuilt:
                    raise ProcessUnusable("keepstep rebuilds process groups only of NCCL and gloo")
                # To free NCCL's groups on another thread was never tried.
                if self._device.type != "cuda":
                    self._retired.retire(group_names())
                dist.destroy_process_group()
            self._abort = None
        self._retired.free()
        # torch names a group by this count, which failed attempts increase too: without a reset a
        # new process would look for this rank in a group of another name.
        reset_group_count()
        if self._device.type == "cuda":
            # Another world size needs blocks of other sizes.
            torch.cuda.empty_cache()


def check_mesh_positions(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that sharded tensors' meshes have this process's current rank at its coordinate.

    Args:
        tensors: any tensors with their names, which are for the error message; only DTensors are
            checked, the first of each mesh.

    Raises:
        RuntimeError: the rank is another one; training would silently corrupt the state.
    """
    checked: dict[int, DeviceMesh] = {}
    for name, tensor in tensors:
        # A mesh computes its ranks again at each access.
        if not isinstance(tensor, DTensor) or id(tensor.device_mesh) in checked:
            continue
        mesh = checked[id(tensor.device_mesh)] = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            continue
        mesh_rank = int(mesh.mesh[tuple(coordinate)])
        if mesh_rank != dist.get_rank():
            raise RuntimeError(
                f"{name} is sharded for rank {mesh_rank}, but this is rank {dist.get_rank()}: "
                "build() must create a new model from the World that it receives"
            )


def _connect_all(device: torch.device) -> None:
    """Run a small collective in every group.

    NCCL connects at the first one. An abort while a thread connects is what NCCL forbids, so it is
    done here, where nothing is computed yet.
    """
    for group in tuple(group_names()):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda.synchronize(device)


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
                # Only what comes in: a thread of gloo that writes on a connection that is shut
                # down, before gloo has seen the end of it, waits until gloo's own limit.
                connection.shutdown(socket.SHUT_RD)
    except OSError:
        return  # The owner or the peer has closed it.
