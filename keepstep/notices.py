"""Leaves the signals that announce a node's end to the one process that answers them.

Schedulers, service managers and terminals send such a signal to every process of a node at once:
Slurm's `scancel` and `--signal`, systemd's `KillMode=control-group`, a terminal that closes. Only
the node's agent answers: it hands over the node's state, for which it needs its workers, its
servers and the coordinator, and then ends them. Until then they ignore such signals.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""SIGUSR1 is the usual choice for Slurm's `--signal`."""

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
# Of <linux/audit.h>, and the number of rt_sigaction(2) there.
_SIGACTION = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
# Of <linux/filter.h>: load a word of `struct seccomp_data`, compare it, return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _PRETEND_SUCCESS = 0x7FFF0000, 0x00050000


@contextmanager
def notices_blocked() -> Iterator[None]:
    """Start processes meanwhile that these signals shall not end: they begin with them blocked.

    They stay blocked in another program; a process of keepstep calls `leave_notices` or
    `restore_notices` as the first thing it does.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_notices() -> None:
    """Ignore them in this process and its children; its parent ends it."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


def restore_notices() -> None:
    """Restore their effect in any Python process."""
    for number in NOTICES:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


def obey_owner_alone(owner: int) -> None:
    """Ignore them in this process, except for SIGTERM from the process that owns it.

    It is for the workers of a data loader, whose owner may end them so. It need not be their
    parent: with a fork server that is another process. Programs that this process starts have them
    blocked.

    Args:
        owner: the owner's process id.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    threading.Thread(target=_obey, args=(owner,), name="notices", daemon=True).start()


def _obey(owner: int) -> None:
    while True:
        notice = signal.sigwaitinfo(NOTICES)
        if notice.si_signo == signal.SIGTERM and notice.si_pid == owner:
            os._exit(0)


def forbid_notice_handlers() -> None:
    """Ignore them in this process for good: a program that it becomes handles none of them either.

    etcd, like any program in Go, installs handlers whatever it inherits.

    So seccomp(2) makes the kernel report success without installing them. On processors other than
    x86-64 and ARM64 nothing is filtered.

    Raises:
        OSError: the kernel refuses.
    """
    leave_notices()
    if platform.machine() not in _SIGACTION:
        return
    architecture, sigaction = _SIGACTION[platform.machine()]
    count = len(NOTICES)
    # Jumps count the instructions to skip if equal, and if not.
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 0, count + 3, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, count + 1, sigaction),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        *((_JUMP_IF_EQUAL, count - i, 0, number) for i, number in enumerate(NOTICES)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _PRETEND_SUCCESS),
    ]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    program = _FilterProgram(len(instructions), ctypes.create_string_buffer(code, len(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, first, second in (
        (_PR_SET_NO_NEW_PRIVS, 1, None),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(option, ctypes.c_ulong(first), second, None, None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({option}): {os.strerror(number)}")


class _FilterProgram(ctypes.Structure):
    """`struct sock_fprog` of <linux/filter.h>."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    def __init__(self, length: int, instructions: ctypes.Array[ctypes.c_char]) -> None:
        super().__init__(length, ctypes.addressof(instructions))
        self._instructions = instructions  # Keeps the memory.
