"""Tests that the native recorder learns which operations are launched together."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from keepstep.monitor.telemetry.coalescing import CoalescingHooks
from keepstep.monitor.telemetry.native import NativeRecorder


class Told:
    """Stands for the native recorder."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def set_coalescing(self, is_coalescing: bool) -> None:
        self.log.append(is_coalescing)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()

    def start(group: object, device: object) -> None:
        told.log.append("start")

    def end(group: object, device: object) -> str:
        told.log.append("end")
        if device == "broken":
            raise RuntimeError("the launch failed")
        return "work"

    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", start)
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", end)
    return told


def test_thread_is_coalescing_from_start_to_end(told: Told) -> None:
    group = cast(Any, dist.ProcessGroup)
    hooks = CoalescingHooks(cast(NativeRecorder, told))
    group._start_coalescing(None, "cuda")
    assert group._end_coalescing(None, "cuda") == "work"
    assert told.log == ["start", True, "end", False]
    group._start_coalescing(None, "cuda")
    with pytest.raises(RuntimeError, match="the launch failed"):
        group._end_coalescing(None, "broken")
    assert told.log[-2:] == ["end", False]
    hooks.remove()


def test_removed_hooks_leave_what_was_there_before_and_after_them(told: Told) -> None:
    group = cast(Any, dist.ProcessGroup)
    start, end = group._start_coalescing, group._end_coalescing
    hooks = CoalescingHooks(cast(NativeRecorder, told))
    assert group._start_coalescing is not start

    def later(group: object, device: object) -> None:
        return None

    group._end_coalescing = later
    hooks.remove()
    assert group._start_coalescing is start
    assert group._end_coalescing is later
    assert end is not later
