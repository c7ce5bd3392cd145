"""Claims about the end of process groups, by groups that only the test's conditions end."""

import threading
from typing import cast

import pytest
import torch
import torch.distributed as dist

from keepstep.elastic.errors import ProcessUnusable
from keepstep.elastic.trainer import tear_down
from keepstep.elastic.trainer.tear_down import GroupAbort, RetiredGroups, check_device
from tests.adaptive_timeouts import patient

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)


class Group:
    """A process group whose abort waits for others', as NCCL's may."""

    def __init__(self, together: threading.Barrier, error: Exception | None = None) -> None:
        self._together = together
        self._error = error
        self.devices: list[int] = []

    def abort(self) -> None:
        self._together.wait(patient(30))
        if self._error is not None:
            raise self._error


def groups_of(*groups: Group) -> tuple[dist.ProcessGroup, ...]:
    return cast("tuple[dist.ProcessGroup, ...]", groups)


def test_groups_whose_aborts_wait_for_each_other_are_aborted() -> None:
    together = threading.Barrier(3)
    GroupAbort(groups_of(*(Group(together) for _ in range(3))), CPU, lambda: 0).wait(patient(30))


def test_abort_that_does_not_end_makes_the_process_unusable() -> None:
    together = threading.Barrier(2)
    abort = GroupAbort(groups_of(Group(together)), CPU, lambda: 0)
    with pytest.raises(ProcessUnusable, match="1 of 1 process groups did not abort") as raised:
        abort.wait(0.0)
    assert not raised.value.is_fault
    together.abort()


def test_abort_that_fails_makes_the_process_unusable() -> None:
    together = threading.Barrier(1)
    abort = GroupAbort(groups_of(Group(together, RuntimeError("sick"))), CPU, lambda: 0)
    with pytest.raises(ProcessUnusable, match="could not be aborted: RuntimeError: sick"):
        abort.wait(patient(30))


def test_abort_waits_until_no_thread_is_inside_a_call() -> None:
    seen: list[int] = []
    inside = [3, 2, 1, 0]

    class Observed(Group):
        def abort(self) -> None:
            seen.append(len(inside))

    abort = GroupAbort(groups_of(Observed(threading.Barrier(1))), CPU, lambda: inside.pop(0))
    abort.wait(patient(30))
    assert seen == [0], "it has asked until nobody was inside"


def test_abort_does_not_wait_for_a_call_that_waits_for_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tear_down, "_CALLS_LIMIT_S", 0.05)
    GroupAbort(groups_of(Group(threading.Barrier(1))), CPU, lambda: 1).wait(patient(30))


def test_each_thread_aborts_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's device is the first GPU until it is set; using that would open a context there."""
    current = threading.local()
    seen: list[torch.device | None] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "at", device))

    class Observed(Group):
        def abort(self) -> None:
            seen.append(getattr(current, "at", None))

    together = threading.Barrier(1)
    GroupAbort(groups_of(Observed(together), Observed(together)), GPU, lambda: 0).wait(patient(30))
    assert seen == [GPU, GPU]


def test_device_is_asked_twice_on_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("set", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(("wait", device)))
    check_device(CPU)
    assert asked == []
    check_device(GPU)
    assert asked == [("set", GPU), ("wait", GPU), ("wait", GPU)]


def test_device_that_has_failed_is_this_process_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def fail_at_the_second(device: torch.device) -> None:
        calls.append(device)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore.")

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", fail_at_the_second)
    with pytest.raises(ProcessUnusable, match="cuda:1 has failed: CUDA error: an ill") as raised:
        check_device(GPU)
    assert raised.value.is_fault
    assert "More" not in str(raised.value)


def test_device_that_takes_long_makes_the_process_unusable_and_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: answer.wait(patient(30)))
    with pytest.raises(ProcessUnusable, match="did not end its work") as raised:
        check_device(GPU, 0.01)
    assert not raised.value.is_fault
    answer.set()


def test_limits_leave_the_agent_the_last_word() -> None:
    from keepstep.elastic.agent import worker_group

    assert tear_down.ABORT_LIMIT_S + tear_down._CHECK_LIMIT_S <= worker_group._ABORT_S


class RetiredGroup(dist.ProcessGroup):
    """A group whose destructor tells which thread runs it, and waits as for a thread of gloo."""

    def __init__(self, may_end: threading.Event, freed_on: list[threading.Thread]) -> None:
        super().__init__(0, 1)
        self._may_end, self._freed_on = may_end, freed_on

    def __del__(self) -> None:
        self._freed_on.append(threading.current_thread())
        self._may_end.wait()


def test_group_that_cannot_end_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tear_down, "_FREED_WITHIN_S", 0.01)
    may_end, freed_on = threading.Event(), list[threading.Thread]()
    retired = RetiredGroups()
    retired.retire([RetiredGroup(may_end, freed_on)])
    retired.free()
    retired.retire([RetiredGroup(may_end, freed_on)])
    retired.free()
    may_end.set()
    for thread in [it for it in threading.enumerate() if it.name == "keepstep-frees-groups"]:
        thread.join(patient(30))
    assert len(freed_on) == 2
    assert threading.main_thread() not in freed_on


def test_group_that_something_refers_to_is_freed_once_nothing_does() -> None:
    may_end, freed_on = threading.Event(), list[threading.Thread]()
    may_end.set()
    retired = RetiredGroups()
    group = RetiredGroup(may_end, freed_on)
    retired.retire([group])
    retired.free()
    assert not freed_on
    del group
    assert not freed_on  # Whoever drops the last other reference does not free it.
    retired.free()
    assert len(freed_on) == 1
    assert threading.main_thread() not in freed_on
