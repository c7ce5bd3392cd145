"""Who gives way to whom on a processor that all want."""

from __future__ import annotations

import os
import threading

_LOWEST = 19


def yield_to_training() -> None:
    """Have this thread, and those that it starts, run when the training leaves a processor free; Linux has priorities by thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
