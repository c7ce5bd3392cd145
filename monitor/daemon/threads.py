"""Runs a daemon's work outside the event loop: one thread owns the watch, another may block.

Everything about the watch happens on its own thread, so the watch needs no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from keepstep.monitor.errors import RuntimeUnreachable
from keepstep.monitor.watch.component_faults import ComponentFaults
from keepstep.monitor.watch.watch import Watch

_Result = TypeVar("_Result")


class WatchThread:
    """The thread that owns a watch. `shutdown` ends it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._executor = ThreadPoolExecutor(1, "watch")

    async def call(self, function: Callable[[Watch], _Result]) -> _Result:
        """Return the result of a function of the watch, called on its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, self._watch)

    def shutdown(self) -> None:
        """Wait for the last call, and end the thread."""
        self._executor.shutdown()


class BlockingThread:
    """A thread for components that may block, one call at a time. `shutdown` ends it."""

    def __init__(self, faults: ComponentFaults) -> None:
        self._faults = faults
        self._executor = ThreadPoolExecutor(1, "blocking")

    async def call(self, component: str, function: Callable[[], _Result]) -> _Result | None:
        """Return a function's result; if it raises, record a fault of the component, return None.

        Raises:
            RuntimeUnreachable: the function raised it. That is no fault of the monitor.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except RuntimeUnreachable:
            raise
        except Exception as error:  # noqa: BLE001 - the other components must go on
            self._faults.record(component, error)
            return None

    def shutdown(self) -> None:
        """Wait for the last call, and end the thread."""
        self._executor.shutdown()
