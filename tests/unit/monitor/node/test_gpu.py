"""Tests who uses a device, which devices are measured, and what is remembered of their errors."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.monitor.node.gpu import GpuProbe, XidListener, users_of_devices


class NvmlError(Exception):
    """The management library's own."""


def library(lost: set[int], count: int | None = 3, **functions: Any) -> SimpleNamespace:
    """Return a management library whose `lost` devices have no handle; others answer nothing.

    With `count` None, it cannot count them.
    """

    def fail(*_arguments: Any) -> Any:
        raise NvmlError

    def handle(index: int) -> int:
        return fail() if index in lost else index

    names = (
        *("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo"),
        *("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo"),
        *("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors", "nvmlEventSetCreate"),
    )
    constants = (
        *("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
        *("NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_VOLATILE_ECC"),
    )
    known = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": fail if count is None else lambda: count,
        "nvmlDeviceGetHandleByIndex": handle,
        **dict.fromkeys(names, fail),
        **dict.fromkeys(constants, 0),
    }
    return SimpleNamespace(**{**known, **functions})


def test_lost_device_leaves_the_others_measured_under_their_own_indices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(lost={1}))
    probe = GpuProbe.open()
    assert probe is not None
    assert [gpu.index for gpu in probe.sample({})] == [0, 2]


@pytest.mark.parametrize(("lost", "count"), [({0, 1, 2}, 3), (set(), None), (set(), 0)])
def test_no_device_that_answers_is_no_probe(
    monkeypatch: pytest.MonkeyPatch, lost: set[int], count: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(lost, count))
    assert GpuProbe.open() is None


@pytest.mark.parametrize(
    ("pids", "visible", "users"),
    [
        pytest.param({0: {10}, 1: {99}}, {10, 99}, {0: (0,), 1: ()}, id="one is another job's"),
        pytest.param({0: {10, 11}}, {10, 11}, {0: (0, 1)}, id="two ranks share it"),
        pytest.param({0: set()}, set(), {0: ()}, id="nobody"),
        pytest.param({0: {99}}, {99}, {0: ()}, id="only another job"),
        pytest.param({0: {99}}, set(), {}, id="a process outside of this container"),
    ],
)
def test_users_of_devices(
    pids: dict[int, set[int]], visible: set[int], users: dict[int, tuple[int, ...]]
) -> None:
    used = {index: frozenset(device_pids) for index, device_pids in pids.items()}
    assert users_of_devices(used, {0: 10, 1: 11}, visible) == users


def test_device_that_fails_without_end_has_a_count_and_its_newest_errors_remembered() -> None:
    codes = iter(range(100_000))
    nvml = library(
        set(),
        nvmlEventSetCreate=object,
        nvmlEventTypeXidCriticalError=8,
        nvmlDeviceRegisterEvents=lambda *_arguments: None,
        nvmlDeviceGetUUID=lambda _device: "only",
        nvmlEventSetWait_v2=lambda *_: SimpleNamespace(device=0, eventData=next(codes)),
    )
    listener = XidListener.open(nvml, {0: 0})
    assert listener is not None
    for _ in range(100):
        xids = listener.collected()[0]
    total = xids.earlier + len(xids.newest)
    assert len(xids.newest) < 1000 < total
    assert xids.newest == tuple(range(total - len(xids.newest), total))
