"""Tying a process's life to its parent's, so that nothing is orphaned whatever dies."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGKILL when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    Args:
        parent: process id of the expected parent; if it has already died, this process exits at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    if os.getppid() != parent:
        os._exit(1)
