"""Measures of NVIDIA GPUs, and their Xid errors, which the driver tells only at the moment they happen: events are collected at every sample,
without waiting.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from keepstep.monitor.diagnosis.metrics import GpuMetrics

_MOST = 64


class XidListener:
    """Remembers each device's critical Xids since it was opened. `close` when done."""

    def __init__(self, nvml: Any, events: Any, index_of: dict[str, int]) -> None:
        self._nvml = nvml
        self._events = events
        self._index_of = index_of
        self._told: dict[int, tuple[int, ...]] = {}

    @classmethod
    def open(cls, nvml: Any, devices: list[Any]) -> XidListener | None:
        """Register for critical errors; None where the driver cannot."""
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        index_of: dict[str, int] = {}
        for index, device in enumerate(devices):
            # A device that cannot tell of its errors is still watched otherwise.
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
                index_of[nvml.nvmlDeviceGetUUID(device)] = index
        return cls(nvml, events, index_of)

    def collected(self) -> dict[int, tuple[int, ...]]:
        """Return the Xids of each device that had any, oldest first."""
        # A bound, so that a device that does nothing but fail cannot keep the monitor here.
        for _ in range(_MOST):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:
                break  # Nothing happened: the library calls that a timeout.
            with suppress(self._nvml.NVMLError):
                index = self._index_of.get(self._nvml.nvmlDeviceGetUUID(event.device))
                if index is not None:
                    self._told[index] = (*self._told.get(index, ()), int(event.eventData))
        return dict(self._told)

    def close(self) -> None:
        """Free what the library keeps for it."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)


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
        devices = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        if not devices:
            pynvml.nvmlShutdown()
            return None
        return cls(pynvml, devices, XidListener.open(pynvml, devices))

    def sample(self) -> tuple[GpuMetrics, ...]:
        """Return every GPU's measures."""
        xids = self._xids.collected() if self._xids is not None else {}
        return tuple(
            self._measure(index, device, xids.get(index, ()))
            for index, device in enumerate(self._devices)
        )

    def close(self) -> None:
        """Let go of the library."""
        if self._xids is not None:
            self._xids.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _measure(self, index: int, device: Any, xids: tuple[int, ...]) -> GpuMetrics:
        nvml = self._nvml

        def ask(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, name)(device, *arguments)
            except nvml.NVMLError:
                # Not every device and driver knows every question; a device fallen off the bus knows none.
                return None

        memory, utilization = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
        uncorrected, corrected = (
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        )
        return GpuMetrics(
            index=index,
            celsius=float(ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU) or 0.0),
            clock_hz=(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM) or 0) * 1e6,
            power_watts=(ask("nvmlDeviceGetPowerUsage") or 0) / 1e3,
            memory_used=int(memory.used) if memory else 0,
            memory_total=int(memory.total) if memory else 0,
            ecc_uncorrected=int(
                ask("nvmlDeviceGetTotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC) or 0
            ),
            ecc_corrected=int(
                ask("nvmlDeviceGetTotalEccErrors", corrected, nvml.NVML_VOLATILE_ECC) or 0
            ),
            xids=xids,
            busy_share=utilization.gpu / 100 if utilization else 0.0,
        )
