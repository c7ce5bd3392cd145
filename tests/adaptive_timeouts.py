"""Scales the timeouts of tests with the machine's load, to tell a fault from a slow machine.

A test waits for conditions; its timeouts only say when to give up. Where other processes share the
cores, everything slows down by the number of runnable processes per core.
"""

import os


def patient(seconds: float) -> float:
    """Return a timeout that is `seconds` on an idle machine, and longer on a busy one."""
    running, _, _ = os.getloadavg()
    return seconds * max(1.0, running / (os.cpu_count() or 1))
