"""Xid errors of NVIDIA GPUs, which the driver tells only at the moment they happen: events are collected at every sample,
without waiting.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

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
