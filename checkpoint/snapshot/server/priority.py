"""Lowers the priority of threads that compete with training for the processor."""

from __future__ import annotations

import os
import threading

_NICENESS = 10


def yield_to_training() -> None:
    """Give this thread, and those that it starts, a tenth of a busy process's share of a core.

    Not the lowest priority, a hundredth: where training and its data loaders keep all cores busy,
    nothing would be committed for minutes, and the end of a job waits for its last snapshot.
    On Linux niceness belongs to threads, and a new thread inherits it. It is counted from the main
    thread's: who yields may have been started by a thread that does.
    """
    main_thread = os.getpriority(os.PRIO_PROCESS, os.getpid())
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), main_thread + _NICENESS)
