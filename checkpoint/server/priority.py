"""Lowers the priority of threads that compete with training for the processor."""

from __future__ import annotations

import os
import threading

_LOWEST_PRIORITY = 19


def yield_to_training() -> None:
    """Give this thread, and those that it starts, the lowest priority.

    On Linux niceness belongs to threads, and a new thread inherits it.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
