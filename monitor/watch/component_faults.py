"""Counts and logs failures of the monitor's components; one failure leaves the rest running.

A component is a reader, a probe, the diagnosis, a publisher and so on. It may fail twice a second,
so a failure is logged at every power of two of its count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from keepstep.monitor.errors import MonitorError

_LOG = logging.getLogger("keepstep.monitor")
_Result = TypeVar("_Result")
_MESSAGE = "the monitor's %s failed (%d times so far); monitoring continues without it: %s"


class ComponentFaults:
    """The number of failures of each component."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def guard(self, component: str, call: Callable[[], _Result], default: _Result) -> _Result:
        """Return the result of a call; if it raises, record that and return `default`."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the other components must go on
            self.record(component, error)
            return default

    def record(self, component: str, error: Exception) -> None:
        """Count a failure, and log it if its count is a power of two."""
        count = self.counts[component] = self.counts.get(component, 0) + 1
        is_power_of_two = count & (count - 1) == 0
        if is_power_of_two:
            # Our own errors and the operating system's explain themselves; others need a traceback.
            explains_itself = isinstance(error, MonitorError | OSError)
            _LOG.error(
                _MESSAGE, component, count, error, exc_info=None if explains_itself else error
            )
