"""Limits of waits that grow with the machine's load: they tell a fault from a slow machine.

A test waits for conditions; its limits only say when to give up. Where other processes share the
cores, everything takes as many times longer as there are processes that want to run for each core.
"""

import os


def patient(seconds: float) -> float:
    """Return a limit of so many seconds on a machine that does nothing else."""
    running, _, _ = os.getloadavg()
    return seconds * max(1.0, running / (os.cpu_count() or 1))
