"""Measures NVIDIA GPUs and collects their Xid errors through NVIDIA's management library.

The driver reports an Xid only when it happens. So `XidListener` registers for these events once,
and every sample fetches the pending ones without waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from keepstep.monitor.diagnosis.metrics import GpuMetrics

_MOST_EVENTS = 64
"""Events read in one sample: a device that fails continuously must not block the monitor."""
_KEPT_XIDS = 256
"""Events kept of one device: every sample and every summary has them. Several samples' worth of
events, so that diagnosis sees each though it reads less often."""

_KIB = 1024
_MOST_LINKS = 18
_NVLINK_ERRORS = (
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)
_VALUE_TYPES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""The member of a field's union that has its value, by NVML_VALUE_TYPE_*."""


class GpuProbe:
    """Measures NVIDIA GPUs. `open` returns None where there is no library or no device answers."""

    def __init__(self, nvml: Any, devices: Mapping[int, Any], xids: XidListener | None) -> None:
        self._nvml = nvml
        self._devices = devices
        self._xids = xids
        # Of the last query that was answered: a device that fell off the bus answers none.
        self._pids: dict[int, frozenset[int]] = {}
        self._before: dict[int, tuple[float, GpuMetrics]] = {}

    @classmethod
    def open(cls) -> GpuProbe | None:
        """Load the management library, if the driver and the Python package provide it."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        devices: dict[int, Any] = {}
        with suppress(pynvml.NVMLError):
            for index in range(pynvml.nvmlDeviceGetCount()):
                # A device that fell off the bus is counted, but has no handle.
                with suppress(pynvml.NVMLError):
                    devices[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not devices:
            pynvml.nvmlShutdown()
            return None
        return cls(pynvml, devices, XidListener.open(pynvml, devices))

    def sample(self, workers: Mapping[int, int], now_s: float) -> tuple[GpuMetrics, ...]:
        """Return every GPU's measures.

        Args:
            workers: process id of each rank: shows which ranks use which device.
            now_s: monotonic.
        """
        xids = self._xids.collected() if self._xids is not None else {}
        for index, device in self._devices.items():
            with suppress(self._nvml.NVMLError):
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
                self._pids[index] = frozenset(int(process.pid) for process in processes)
        visible = {pid for pids in self._pids.values() for pid in pids if psutil.pid_exists(pid)}
        users = users_of_devices(self._pids, workers, visible)
        measured = tuple(
            self._with_rates(
                self._measure(index, device, xids.get(index, _NO_XIDS), users.get(index)), now_s
            )
            for index, device in self._devices.items()
        )
        self._before = {gpu.index: (now_s, gpu) for gpu in measured}
        return measured

    def close(self) -> None:
        """Release the library."""
        if self._xids is not None:
            self._xids.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _measure(
        self, index: int, device: Any, xids: Xids, ranks: tuple[int, ...] | None
    ) -> GpuMetrics:
        nvml = self._nvml

        def query(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, name)(device, *arguments)
            except nvml.NVMLError:
                # Not every device and driver supports every query; a device that fell off the bus
                # supports none.
                return None

        values = self._fields(device)
        memory = query("nvmlDeviceGetMemoryInfo")
        utilization = query("nvmlDeviceGetUtilizationRates")
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        corrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        return GpuMetrics(
            index=index,
            celsius=float(query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU) or 0.0),
            clock_hz=(query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM) or 0) * 1e6,
            power_watts=(query("nvmlDeviceGetPowerUsage") or 0) / 1e3,
            memory_used=int(memory.used) if memory else 0,
            memory_total=int(memory.total) if memory else 0,
            ecc_uncorrected=int(
                query("nvmlDeviceGetTotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC) or 0
            ),
            ecc_corrected=int(
                query("nvmlDeviceGetTotalEccErrors", corrected, nvml.NVML_VOLATILE_ECC) or 0
            ),
            xids=xids.newest,
            earlier_xids=xids.earlier,
            busy_share=utilization.gpu / 100 if utilization else 0.0,
            ranks=ranks,
            power_limit_watts=(query("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1e3,
            memory_celsius=float(values.get((nvml.NVML_FI_DEV_MEMORY_TEMP, 0), 0)),
            memory_busy_share=utilization.memory / 100 if utilization else 0.0,
            # Those that were corrected, and those that were not.
            remapped_rows=sum(map(int, (query("nvmlDeviceGetRemappedRows") or (0, 0))[:2])),
            nvlink_sent_nbytes=_KIB * _sum(values, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            nvlink_received_nbytes=_KIB * _sum(values, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            nvlink_errors=sum(_sum(values, getattr(nvml, name)) for name in _NVLINK_ERRORS),
        )

    def _with_rates(self, gpu: GpuMetrics, now_s: float) -> GpuMetrics:
        """Return the measures with the traffic since the last sample; counters may start again."""
        before_s, before = self._before.get(gpu.index, (now_s, gpu))
        if now_s <= before_s:
            return gpu
        sent = gpu.nvlink_sent_nbytes - before.nvlink_sent_nbytes
        received = gpu.nvlink_received_nbytes - before.nvlink_received_nbytes
        return replace(
            gpu,
            nvlink_sent_per_s=max(0.0, sent / (now_s - before_s)),
            nvlink_received_per_s=max(0.0, received / (now_s - before_s)),
        )

    def _fields(self, device: Any) -> dict[tuple[int, int], int]:
        """Return the values of a device that NVML has as fields, by field and link."""
        nvml = self._nvml
        wanted = [(nvml.NVML_FI_DEV_MEMORY_TEMP, 0)]
        wanted += [(getattr(nvml, name), 0) for name in _NVLINK_ERRORS]
        wanted += [
            (field, link)
            for field in (
                nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
                nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
            )
            for link in range(_MOST_LINKS)
        ]
        try:
            answers = nvml.nvmlDeviceGetFieldValues(device, wanted)
        except nvml.NVMLError:
            return {}
        return {
            field: int(getattr(answer.value, _VALUE_TYPES[answer.valueType]))
            for field, answer in zip(wanted, answers, strict=True)
            # Each field has a status of its own: a link that is not there has none.
            if answer.nvmlReturn == nvml.NVML_SUCCESS and answer.valueType in _VALUE_TYPES
        }


def _sum(values: Mapping[tuple[int, int], int], wanted: int) -> int:
    """Return a field's value, of all links together."""
    return sum(value for (field, _), value in values.items() if field == wanted)


def users_of_devices(
    pids: Mapping[int, frozenset[int]], workers: Mapping[int, int], visible: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """Return the ranks that use each device, for devices whose users are known.

    In a container the driver names processes by their ids outside of it. So if no worker is named,
    and a process that does not exist here is, it is not known who uses which device.

    Args:
        pids: processes that use each device, as the driver names them.
        workers: process id of each rank.
        visible: those of `pids` that exist here.
    """
    rank_of = {pid: rank for rank, pid in workers.items()}
    users = {
        index: tuple(sorted(rank_of[pid] for pid in device_pids if pid in rank_of))
        for index, device_pids in pids.items()
    }
    is_known = any(users.values()) or all(pid in visible for used in pids.values() for pid in used)
    return users if is_known else {}


@dataclass(frozen=True, slots=True)
class Xids:
    """A device's Xids: the newest codes, oldest first, and the number of those before them."""

    newest: tuple[int, ...] = ()
    earlier: int = 0

    def with_code(self, code: int) -> Xids:
        """Return them with one more."""
        surplus = max(0, len(self.newest) + 1 - _KEPT_XIDS)
        return Xids((*self.newest, code)[surplus:], self.earlier + surplus)


_NO_XIDS = Xids()


class XidListener:
    """Remembers each device's critical Xids since it was opened. `close` when done."""

    def __init__(self, nvml: Any, events: Any, index_of: dict[str, int]) -> None:
        self._nvml = nvml
        self._events = events
        self._index_of = index_of
        self._xids: dict[int, Xids] = {}

    @classmethod
    def open(cls, nvml: Any, devices: Mapping[int, Any]) -> XidListener | None:
        """Register for critical errors; return None where the driver does not support that."""
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        index_of: dict[str, int] = {}
        for index, device in devices.items():
            # A device that cannot report its errors is still measured.
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
                index_of[nvml.nvmlDeviceGetUUID(device)] = index
        return cls(nvml, events, index_of)

    def collected(self) -> dict[int, Xids]:
        """Return the Xids of each device that had any."""
        for _ in range(_MOST_EVENTS):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                break  # No event is pending: the library reports that as a timeout.
            with suppress(self._nvml.NVMLError):
                index = self._index_of.get(self._nvml.nvmlDeviceGetUUID(event.device))
                if index is not None:
                    earlier = self._xids.get(index, _NO_XIDS)
                    self._xids[index] = earlier.with_code(int(event.eventData))
        return dict(self._xids)

    def close(self) -> None:
        """Release what the library holds for the listener."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)
