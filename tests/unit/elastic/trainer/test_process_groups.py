"""Claims about leaving process groups: where there are none, and while an order to abort comes."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from keepstep.elastic.errors import ProcessUnusable
from keepstep.elastic.trainer import process_groups
from keepstep.elastic.trainer.process_groups import ProcessGroups
from tests.patience import patient


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
    """What the order would note later would be taken for an abort of the next groups."""
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
