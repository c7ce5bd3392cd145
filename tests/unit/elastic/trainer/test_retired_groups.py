"""Claims about who frees process groups that were left."""

import threading

import pytest
import torch.distributed as dist

from keepstep.elastic.trainer import retired_groups
from keepstep.elastic.trainer.retired_groups import RetiredGroups
from tests.adaptive_timeouts import patient


class Group(dist.ProcessGroup):
    """A group whose destructor tells which thread runs it, and waits as for a thread of gloo."""

    def __init__(self, may_end: threading.Event, freed_on: list[threading.Thread]) -> None:
        super().__init__(0, 1)
        self._may_end, self._freed_on = may_end, freed_on

    def __del__(self) -> None:
        self._freed_on.append(threading.current_thread())
        self._may_end.wait()


def test_group_that_cannot_end_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retired_groups, "_FREED_WITHIN_S", 0.01)
    may_end, freed_on = threading.Event(), list[threading.Thread]()
    retired = RetiredGroups()
    retired.retire([Group(may_end, freed_on)])
    retired.free()
    retired.retire([Group(may_end, freed_on)])
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
    group = Group(may_end, freed_on)
    retired.retire([group])
    retired.free()
    assert not freed_on
    del group
    assert not freed_on  # Whoever drops the last other reference does not free it.
    retired.free()
    assert len(freed_on) == 1
    assert threading.main_thread() not in freed_on
