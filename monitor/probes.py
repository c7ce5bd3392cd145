"""Taking a node's measures: /proc by psutil, the cgroup, and NVIDIA's management library where it is there.

Whatever cannot be read is None in the result, never an error: a monitor without a thermometer is still a monitor. What
changes slowly or costs a millisecond to read is read less often than twice a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from monitor import cgroups
from monitor.metrics import GpuMetrics, NodeMetrics
from monitor.xid import XidListener

_SLOW_EVERY_S = 5.0


class NodeProbe:
    """Measures this node. Shares and latencies are over the time since the last sample; the first has none. `close` when done."""

    def __init__(self) -> None:
        self._cgroups: dict[int, cgroups.CgroupFiles] = {}
        self._gpus = GpuProbe.open()
        self._busy: tuple[float, float] | None = None
        self._disk: tuple[int, float] | None = None
        self._slow: tuple[float | None, float | None, tuple[GpuMetrics, ...]] = (None, None, ())
        self._slow_due_s = 0.0

    def sample(self, workers: Sequence[int] = ()) -> NodeMetrics:
        """Return the measures as they are now; what is about a cgroup, of the `workers`' (process ids), not of the monitor's own."""
        self._cgroups = {worker: self._cgroups.get(worker) or cgroups.find(worker) for worker in workers}
        groups = set(self._cgroups.values())
        now_s = time.monotonic()
        if now_s >= self._slow_due_s:
            self._slow_due_s = now_s + _SLOW_EVERY_S
            frequency = psutil.cpu_freq()
            gpus = self._gpus.sample() if self._gpus is not None else ()
            self._slow = (
                (frequency.current or None) if frequency else None,
                (frequency.max or None) if frequency else None,
                gpus,
            )
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        total, available = memory.total, memory.available
        for group in groups:
            limit, held = cgroups.memory_limit_nbytes(group), cgroups.memory_held_nbytes(group)
            if limit is not None and held is not None and limit - held < available:
                total, available = limit, max(0, limit - held)
        denied = [denied_s for group in groups if (denied_s := cgroups.throttled_s(group)) is not None]
        return NodeMetrics(
            taken_at_s=now_s,
            cpus=psutil.cpu_count() or 0,
            cpu_share=self._cpu_share(),
            throttled_s=max(denied, default=None),
            cpu_mhz=self._slow[0],
            cpu_max_mhz=self._slow[1],
            load=psutil.getloadavg()[0],
            memory_total_nbytes=total,
            memory_available_nbytes=available,
            swap_used_nbytes=swap.used,
            disk_latency_s=self._disk_latency_s(),
            gpus=self._slow[2],
        )

    def close(self) -> None:
        """Let go of the management library."""
        if self._gpus is not None:
            self._gpus.close()

    def _cpu_share(self) -> float | None:
        times = psutil.cpu_times()
        total_s = float(sum(times[:8]))  # user to steal; guest time is in user already
        busy_s = total_s - float(times.idle) - float(times.iowait)
        before, self._busy = self._busy, (busy_s, total_s)
        if before is None or total_s <= before[1]:
            return None
        return min(1.0, max(0.0, (busy_s - before[0]) / (total_s - before[1])))

    def _disk_latency_s(self) -> float | None:
        told = psutil.disk_io_counters()
        if told is None:
            return None
        requests, spent_s = int(told.read_count + told.write_count), float(told.read_time + told.write_time) / 1e3
        before, self._disk = self._disk, (requests, spent_s)
        if before is None or requests <= before[0]:
            return None
        return max(0.0, (spent_s - before[1]) / (requests - before[0]))


class GpuProbe:
    """Measures NVIDIA GPUs. `open` returns None where there is no library or no device."""

    def __init__(self, nvml: Any, devices: list[Any], xids: XidListener | None) -> None:
        self._nvml = nvml
        self._devices = devices
        self._xids = xids

    @classmethod
    def open(cls) -> GpuProbe | None:
        """Load the management library, if the driver has one and the Python package is installed."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if not devices:
            pynvml.nvmlShutdown()
            return None
        return cls(pynvml, devices, XidListener.open(pynvml, devices))

    def sample(self) -> tuple[GpuMetrics, ...]:
        """Return every GPU's measures."""
        xids = self._xids.newest() if self._xids is not None else {}
        return tuple(self._measure(index, device, xids.get(index, 0)) for index, device in enumerate(self._devices))

    def close(self) -> None:
        """Let go of the library."""
        if self._xids is not None:
            self._xids.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _measure(self, index: int, device: Any, xid: int) -> GpuMetrics:
        nvml = self._nvml

        def ask(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, name)(device, *arguments)
            except nvml.NVMLError:
                # Not every device and driver knows every question; a device fallen off the bus knows none.
                return None

        memory = ask("nvmlDeviceGetMemoryInfo")
        utilization = ask("nvmlDeviceGetUtilizationRates")
        power_mw = ask("nvmlDeviceGetPowerUsage")
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        slowing = (
            nvml.nvmlClocksThrottleReasonSwPowerCap
            | nvml.nvmlClocksThrottleReasonHwSlowdown
            | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        uncorrected, corrected, volatile = (
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        return GpuMetrics(
            index=index,
            temperature_celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            memory_used_nbytes=memory.used if memory else None,
            memory_total_nbytes=memory.total if memory else None,
            utilization=utilization.gpu / 100 if utilization else None,
            power_watts=power_mw / 1e3 if power_mw is not None else None,
            is_throttled=bool(reasons & slowing) if reasons is not None else None,
            ecc_uncorrected=ask("nvmlDeviceGetTotalEccErrors", uncorrected, volatile),
            ecc_corrected=ask("nvmlDeviceGetTotalEccErrors", corrected, volatile),
            xid=xid,
        )
