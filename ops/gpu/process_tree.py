"""Ends a process with all its descendants, also those that left its session or lost their parent.

A process that has called `adopt_orphans` becomes the parent of every descendant whose own parent
ends (prctl(2), PR_SET_CHILD_SUBREAPER). So what a check leaves behind is found below it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 20.0


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


def descendants(process: int) -> list[int]:
    """Return the ids of all processes below this one, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The name, in parentheses, may hold anything; state and parent follow it.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # It has ended.
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(process, ()))
    for child in found:
        found += children.get(child, ())
    return found


def kill_descendants() -> list[int]:
    """Kill and reap everything below this process; return what a driver keeps alive regardless."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while remaining := descendants(os.getpid()):
        if time.monotonic() > deadline_s:
            return remaining
        for process in remaining:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        time.sleep(0.01)
    return []


def _reap() -> None:
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == 0:
            return
