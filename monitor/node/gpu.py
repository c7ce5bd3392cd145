"""Measures NVIDIA GPUs and collects their Xid errors through NVIDIA's management library.

The driver reports an Xid only when it happens. So `XidListener` registers for these events once,
and every sample fetches the pending ones without waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from keepstep.monitor.diagnosis.metrics import GpuMetrics

_MOST_EVENTS = 64
"""Events read in one sample: a device that fails continuously must not block the monitor."""
_KEPT_XIDS = 256
"""Events kept of one device: every sample and every summary has them. Several samples' worth of
events, so that diagnosis sees each though it reads less often."""


class GpuProbe:
    """Measures NVIDIA GPUs. `open` returns None where there is no library or no device answers."""

    def __init__(self, nvml: Any, devices: Mapping[int, Any], xids: XidListener | None) -> None:
        self._nvml = nvml
        self._devices = devices
        self._xids = xids
        # Of the last query that was answered: a device that fell off the bus answers none.
        self._pids: dict[int, frozenset[int]] = {}

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

    def sample(self, workers: Mapping[int, int]) -> tuple[GpuMetrics, ...]:
        """Return every GPU's measures.

        Args:
            workers: process id of each rank: shows which ranks use which device.
        """
        xids = self._xids.collected() if self._xids is not None else {}
        for index, device in self._devices.items():
            with suppress(self._nvml.NVMLError):
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
                self._pids[index] = frozenset(int(process.pid) for process in processes)
        visible = {pid for pids in self._pids.values() for pid in pids if psutil.pid_exists(pid)}
        users = users_of_devices(self._pids, workers, visible)
        return tuple(
            self._measure(index, device, xids.get(index, _NO_XIDS), users.get(index))
            for index, device in self._devices.items()
        )

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
        )


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
