"""Starts helper processes, ties their lives to their parent's, sets priorities and descriptors.

`python -P -m keepstep.processes PARENT_PID PROGRAM [ARGUMENTS...]` becomes another program whose
life ends with its parent's, and which leaves signals that announce a node's end to it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.notices import forbid_notice_handlers

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15

_NICENESS = 10


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of keepstep in a process of its own.

    `-P` keeps the current folder out of the module search path: a helper never imports a user's
    `checkpoint.py` or `types.py` next to their script. A helper imports the keepstep that starts
    it, even if another one is installed. If that one is a source tree, the tree is added to the
    path last, so that its folders hide no other package.
    """
    root = Path(__file__).absolute().parent.parent
    if root.name in ("site-packages", "dist-packages"):
        return [sys.executable, "-P", "-m", module, *arguments]
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(root)!r}); import keepstep; "
        "sys.path.append(sys.path.pop(0)); sys.argv.pop(0); "
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", code, module, *arguments]


def die_with_parent(parent: int) -> None:
    """Make the kernel send this process SIGKILL when the thread that started it ends.

    Uses prctl(2), PR_SET_PDEATHSIG.

    Args:
        parent: process id of the expected parent; if it has already died, this process exits.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def allow_all_descriptors() -> None:
    """Raise the limit of open files of this process and its children to the highest allowed.

    gloo has a connection to every other rank, for each process group, and a leader one to every
    agent: the usual soft limit of 1,024 is for programs that use select(2).
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_standard_descriptors() -> None:
    """Open /dev/null where this process was started without an input or output, as by `>&-`.

    Otherwise the next socket would get the number, and a worker's output would be sent over it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def set_title(title: str, module: str) -> None:
    """Make ps(1) and the like show this process by a title, followed by the module that it runs.

    The title overwrites the memory of the arguments; its size is fixed, and a longer title is cut
    off. top(1) shows 15 bytes of the title.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end; see proc(5).
    tail = b"\0" + module.encode() + b"\0"
    room = end - begin - len(tail)
    if room <= 0:
        return
    shown = title.encode(errors="replace").replace(b"\0", b" ")
    ctypes.memmove(begin, (shown[:room] + tail).ljust(end - begin, b"\0"), end - begin)
    name = ctypes.create_string_buffer(shown.removeprefix(b"keepstep ")[:15])
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def yield_to_training() -> None:
    """Give this thread, and those that it starts, a tenth of a busy process's share of a core.

    Not the lowest priority, a hundredth: where training and its data loaders keep all cores busy,
    nothing would be committed for minutes, and the end of a job waits for its last snapshot.
    On Linux niceness belongs to threads, and a new thread inherits it. It is counted from the main
    thread's: the caller may have been started by a thread that yields.
    """
    main_thread = os.getpriority(os.PRIO_PROCESS, os.getpid())
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), main_thread + _NICENESS)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make descendants whose parent ends meanwhile children of this process.

    It then waits for them, and they end with it, as if it had started them. Uses prctl(2),
    PR_SET_CHILD_SUBREAPER. For one task at a time.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 0)


def _prctl(name: str, option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({name}): {os.strerror(code)}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    forbid_notice_handlers()
    os.execv(sys.argv[2], sys.argv[2:])
