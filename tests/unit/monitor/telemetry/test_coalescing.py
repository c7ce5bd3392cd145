"""Tests that the native recorder learns which operations are launched together."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from keepstep.monitor.telemetry.coalescing import CoalescingHooks
from keepstep.monitor.telemetry.native import NativeRecorder


class Recorder:
    """Stands for the native recorder."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def set_coalescing(self, is_coalescing: bool) -> None:
        self.log.append(is_coalescing)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    def start(group: object, device: object) -> None:
        recorder.log.append("start")

    def end(group: object, device: object) -> str:
        recorder.log.append("end")
        if device == "broken":
            raise RuntimeError("the launch failed")
        return "work"

    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", start)
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", end)
    return recorder


def test_thread_is_coalescing_from_start_to_end(recorder: Recorder) -> None:
    group = cast(Any, dist.ProcessGroup)
    hooks = CoalescingHooks(cast(NativeRecorder, recorder))
    group._start_coalescing(None, "cuda")
    assert group._end_coalescing(None, "cuda") == "work"
    assert recorder.log == ["start", True, "end", False]
    group._start_coalescing(None, "cuda")
    with pytest.raises(RuntimeError, match="the launch failed"):
        group._end_coalescing(None, "broken")
    assert recorder.log[-2:] == ["end", False]
    hooks.remove()


def test_removed_hooks_leave_what_was_there_before_and_after_them(recorder: Recorder) -> None:
    group = cast(Any, dist.ProcessGroup)
    start, end = group._start_coalescing, group._end_coalescing
    hooks = CoalescingHooks(cast(NativeRecorder, recorder))
    assert group._start_coalescing is not start

    def later(group: object, device: object) -> None:
        return None

    group._end_coalescing = later
    hooks.remove()
    assert group._start_coalescing is start
    assert group._end_coalescing is later
    assert end is not later
