"""Orders accesses to a ring between its writer and its readers, on processors that do not.

A seqlock needs the writer's stores, and the reader's loads, in the order of the program. x86 keeps
both. ARM (Grace, Graviton) and others keep neither, and Python has no instruction for it. Linux has
`membarrier`: when the reader calls it between two loads, every processor that runs a registered
process passes a full barrier in between; a process that does not run passed one when it stopped.
So of two stores of a writer the reader never sees only the later one, if it loads them in the
opposite order with the call in between (Desnoyers et al., "User-level implementations of
read-copy update", IEEE TPDS 2012). The writer registers once and pays nothing for a record.

The native writer orders its own stores, and needs this for its readers' loads only.

Where the kernel refuses the call, as some containers' seccomp profiles make it, a reader waits a
millisecond in between instead. By then a processor has written its stores back, although no
architecture says so.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import time
from functools import cache

_LOG = logging.getLogger("keepstep.monitor")

_CALL_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "loongarch64": 283, "ppc64le": 365}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2

_STORED_AFTER_S = 0.001

KEEPS_ORDER = platform.machine() in ("x86_64", "i686")
"""Whether this processor keeps loads in order, and stores."""


def register_writer() -> None:
    """Let readers order their loads against this process's stores. Once in each process."""
    if not KEEPS_ORDER:
        _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def order_loads() -> None:
    """Order the loads before against those after, as seen from all registered writers.

    Takes some microseconds, nothing where the processor keeps the order, and a millisecond where
    the kernel refuses.
    """
    if not KEEPS_ORDER and not _membarrier(_GLOBAL_EXPEDITED):
        time.sleep(_STORED_AFTER_S)


def _membarrier(command: int) -> bool:
    """Call the kernel; return whether it did what was asked."""
    number = _CALL_NUMBERS.get(platform.machine())
    if number is None or _libc().syscall(number, command, 0, 0) != 0:
        _warn_once()
        return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _warn_once() -> None:
    _LOG.warning(
        "this kernel refuses membarrier, which this processor (%s) needs for reading records while "
        "they are written: readers wait a millisecond instead, several times a reading. Allow the "
        "system call in the container's seccomp profile.",
        platform.machine(),
    )
