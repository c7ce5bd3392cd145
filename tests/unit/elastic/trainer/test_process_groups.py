"""Claims about leaving process groups: where there are none, and while an order to abort comes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from keepstep.elastic.errors import ProcessUnusable
from keepstep.elastic.trainer import process_groups
from keepstep.elastic.trainer.process_groups import ProcessGroups, World, check_mesh_positions
from tests.adaptive_timeouts import patient
from tests.unit.elastic.agent.test_worker_group import places


def test_device_is_checked_also_where_creating_the_groups_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sick device may be why; the process would fail again in the next generation."""

    def refuse(device: torch.device) -> None:
        raise ProcessUnusable(f"{device} has failed", is_fault=True)

    monkeypatch.setattr(process_groups, "check_device", refuse)
    with pytest.raises(ProcessUnusable, match="has failed"):
        ProcessGroups("cpu").leave()


@pytest.mark.parametrize(
    ("backend", "awaits"),
    [(None, False), ("cpu:gloo,cuda:gloo", False), ("nccl", True), ("cpu:gloo,cuda:nccl", True)],
)
def test_abort_is_ordered_wherever_it_may_leave_garbage(backend: str | None, awaits: bool) -> None:
    assert ProcessGroups("cpu", backend).awaits_abort_order is awaits


def create_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def group() -> Iterator[None]:
    create_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class ObservedLock:
    """A lock that tells when a thread begins to wait for it."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._on_wait = on_wait

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._on_wait()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Race:
    """A rank that leaves its groups while an order to abort them is carried out.

    The order is held up at one place until the rank has left, or waits for the order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aborts = 0
        self._held, self._settled = threading.Event(), threading.Event()
        self._groups = ProcessGroups("cpu", "other")
        self._groups._changing = ObservedLock(self._settled.set)  # type: ignore[assignment]
        self._order = threading.Thread(target=self._groups.abort, daemon=True)
        race = self

        class Abort:
            def __init__(self, *_: object) -> None:
                race.aborts += 1
                race.on_begin()

            def wait(self) -> None:
                race.on_wait()

        monkeypatch.setattr(process_groups, "GroupAbort", Abort)

    def on_begin(self) -> None:
        """An abort begins."""

    def on_wait(self) -> None:
        """The rank that leaves waits for the end of an abort."""

    def order(self) -> None:
        """Begin to carry out the order; return when it is held up."""
        self._order.start()
        assert self._held.wait(patient(30))

    def hold(self) -> None:
        """Hold up the order, if it is what calls this."""
        if threading.current_thread() is self._order:
            self._held.set()
            assert self._settled.wait(patient(30))

    def leave(self) -> None:
        """Leave the groups, then let the order go on."""
        self._groups.leave()
        self._settled.set()
        self._order.join(patient(30))

    def abort_next(self) -> int:
        """Enter and abort other groups; return how often groups were aborted in all."""
        create_group()
        self._groups.abort()
        return self.aborts


def test_rank_that_leaves_waits_for_the_abort_that_an_order_begins(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later record of the order would be taken for an abort of the next groups."""
    race = Race(monkeypatch)
    race.on_begin = race.hold  # type: ignore[method-assign]
    race.order()
    race.leave()
    assert race.aborts == 1
    assert race.abort_next() == 2


def test_groups_are_not_destroyed_while_an_order_looks_at_them(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    race, is_initialized = Race(monkeypatch), dist.is_initialized

    def look() -> bool:
        there = is_initialized()
        race.hold()
        return there

    monkeypatch.setattr(dist, "is_initialized", look)
    race.on_wait = race.order  # type: ignore[method-assign]
    race.leave()
    assert race.aborts == 1
    assert race.abort_next() == 2


@contextmanager
def entered(groups: ProcessGroups, generation: int, name: str = "dp") -> Iterator[World]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (assignment,) = places(generation, 1)
    where = replace(assignment, store_host="127.0.0.1", store_port=store.port)
    try:
        yield groups.enter(where, {name: -1})
    finally:
        groups.leave()


def slow_propagations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows whenever DTensor finds out how an operation shards its result."""
    found: list[object] = []
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagate = propagator.propagate_op_sharding_non_cached

    def note(schema: Any) -> Any:
        found.append(schema)
        return propagate(schema)

    monkeypatch.setattr(propagator, "propagate_op_sharding_non_cached", note)
    return found


def doubled(world: World) -> DTensor:
    return DTensor.from_local(torch.ones(3), world.mesh, [Shard(0)], run_check=False) * 2


def test_rank_that_keeps_its_place_keeps_what_dtensor_has_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, found = ProcessGroups("cpu"), slow_propagations(monkeypatch)
    with entered(groups, 1) as world:
        doubled(world)
        assert found
    found.clear()
    with entered(groups, 2) as world:
        product = doubled(world)
        assert not found
        assert product.device_mesh is world.mesh
        assert world.mesh.get_group() is dist.group.WORLD
        if not torch.__version__.startswith("2.10."):
            assert world.mesh._pg_registry == {"0": dist.group.WORLD}
        assert torch.equal(product.full_tensor(), torch.full((3,), 2.0))


@pytest.mark.parametrize("change", ["dimension", "groups", "destroyed groups"])
def test_what_dtensor_has_found_out_is_forgotten_where_it_may_be_wrong(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It may refer to a group by a name that another one has in the next generation."""
    groups, found = ProcessGroups("cpu"), slow_propagations(monkeypatch)
    with entered(groups, 1) as world:
        doubled(world)
        if change != "dimension":
            group = dist.new_group([0])
            if change == "destroyed groups":
                dist.destroy_process_group(group)
    found.clear()
    with entered(groups, 2, "tp" if change == "dimension" else "dp") as world:
        doubled(world)
        assert found


def test_rank_that_has_another_place_forgets_what_dtensor_has_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, found = ProcessGroups("cpu"), slow_propagations(monkeypatch)
    with entered(groups, 1) as world:
        doubled(world)
    assert groups._kept is not None
    place, mesh = groups._kept
    groups._kept = replace(place, rank=1, sizes=(2,)), mesh
    found.clear()
    with entered(groups, 2) as world:
        doubled(world)
        assert found
        assert world.mesh is not mesh


def test_what_is_compiled_uses_the_groups_of_its_generation() -> None:
    groups = ProcessGroups("cpu")
    meshes = []
    for generation in (1, 2, 3):
        with entered(groups, generation) as world:
            meshes.append(world.mesh)
            compiled = torch.compile(
                lambda tensor: (tensor * 2).full_tensor(), backend="eager", fullgraph=True
            )
            shards = DTensor.from_local(torch.ones(3), world.mesh, [Shard(0)], run_check=False)
            assert torch.equal(compiled(shards), torch.full((3,), 2.0))
        torch._dynamo.reset()
    assert meshes[0] is meshes[1] is meshes[2]


def test_meshes_made_of_the_worlds_mesh_use_the_groups_of_their_generation() -> None:
    """`build` makes the experts' mesh from that of the data by `_unflatten`, and flattens both."""
    groups = ProcessGroups("cpu")
    for generation in (1, 2, 3):
        with entered(groups, generation) as world:
            flat = world.mesh._flatten("all")
            experts = world.mesh._unflatten(0, (1, 1), ("dp_shard", "ep"))
            for group in (flat.get_group(), experts.get_group("ep"), world.mesh.get_group()):
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                assert total.item() == 1
            assert torch.equal(doubled(world).full_tensor(), torch.full((3,), 2.0))


def sharded_for(rank: int) -> torch.Tensor:
    """Return a tensor that is sharded over two ranks, as one of them holds it."""
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=rank)
    return DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)


def test_tensor_that_is_sharded_for_another_rank_is_named(group: None) -> None:
    own, plain, other = sharded_for(0), torch.zeros(2), sharded_for(1)
    check_mesh_positions([("a", own), ("b", plain), ("c", own)])
    with pytest.raises(RuntimeError, match=r"^c is sharded for rank 1, but this is rank 0"):
        check_mesh_positions([("a", own), ("b", plain), ("c", other)])
