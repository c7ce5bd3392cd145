"""Tests who uses a device, which devices are measured, and what is remembered of their errors."""

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
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
        *("nvmlDeviceGetFieldValues", "nvmlDeviceGetRemappedRows"),
        "nvmlDeviceGetEnforcedPowerLimit",
    )
    constants = (
        *("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
        *("NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_VOLATILE_ECC"),
        *(name for name in vars(pynvml) if name.startswith("NVML_FI_DEV_")),
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
    assert [gpu.index for gpu in probe.sample({}, 0.0)] == [0, 2]


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


def field_value(kind: int, member: str, value: float, status: int = 0) -> pynvml.c_nvmlFieldValue_t:
    answer = pynvml.c_nvmlFieldValue_t()
    answer.valueType, answer.nvmlReturn = kind, status
    setattr(answer.value, member, value)
    return answer


def test_memory_and_links_are_measured_in_the_types_that_the_library_has() -> None:
    """The values of one H100 with two links, as nvidia-ml-py returns them."""
    ullong = (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, "ullVal")
    kib = {0: 1000, 1: 500}

    def fields(_: int, wanted: list[tuple[int, int]]) -> list[pynvml.c_nvmlFieldValue_t]:
        answers = []
        for field, link in wanted:
            if field == pynvml.NVML_FI_DEV_MEMORY_TEMP:
                answers.append(field_value(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 71))
            elif field == pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and link in kib:
                answers.append(field_value(*ullong, kib[link]))
            elif field == pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL:
                answers.append(field_value(*ullong, 3))
            else:
                answers.append(field_value(*ullong, 99, pynvml.NVML_ERROR_NOT_SUPPORTED))
        return answers

    functions = {
        name: getattr(pynvml, name) for name in vars(pynvml) if name.startswith("NVML_FI_DEV_")
    }
    nvml = library(
        set(),
        1,
        **functions,
        NVML_SUCCESS=pynvml.NVML_SUCCESS,
        nvmlDeviceGetFieldValues=fields,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=90, memory=40),
        nvmlDeviceGetEnforcedPowerLimit=lambda _: 700_000,
        nvmlDeviceGetRemappedRows=lambda _: (2, 1, 0, 0),
    )
    probe = GpuProbe(nvml, {0: 0}, None)
    (first,) = probe.sample({}, 10.0)
    assert (first.memory_celsius, first.memory_busy_share) == (71.0, 0.4)
    assert (first.power_limit_watts, first.remapped_rows) == (700.0, 3)
    assert (first.nvlink_sent_nbytes, first.nvlink_received_nbytes) == (1500 * 1024, 0)
    assert (first.nvlink_errors, first.nvlink_sent_per_s) == (3, 0.0)
    kib[1] += 100
    (second,) = probe.sample({}, 12.0)
    assert second.nvlink_sent_per_s == 100 * 1024 / 2
    # The driver was loaded again, and its counters begin again.
    kib.update({0: 0, 1: 0})
    assert probe.sample({}, 14.0)[0].nvlink_sent_per_s == 0.0
