"""Watches what a case does: Python's audit events, and memory.

Reading a checkpoint opens files below its directory, starts threads that read, and nothing else. It
imports nothing, for what readers need is imported before.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

_ALLOWED = frozenset({
    "builtins.id", "object.__getattr__", "object.__setattr__", "sys._getframe", "os.listdir",
    "os.scandir", "pathlib.Path.rglob", "pathlib.Path.glob", "_thread.start_new_thread",
    "cpython._PySys_ClearAuditHooks", "array.__new__", "mmap.__new__", "gc.get_objects",
    "_thread.start_joinable_thread", "glob.glob", "glob.glob/2", "time.sleep",
})  # fmt: skip
_MOST_ADDRESSES_NBYTES = 3 * 2**30


class Guard:
    """Notes audit events that no reader may cause. There is one in a process, for good."""

    def __init__(self, place: Path) -> None:
        """Begin to note events.

        Args:
            place: the only directory that files may be opened in, and written if a case is no
                reader's.
        """
        self._place = f"{place}/"
        self._is_watching = False
        self.events: list[str] = []
        sys.addaudithook(self._note)

    def watch(self, is_watching: bool) -> None:
        """Begin or end to note events."""
        self._is_watching = is_watching

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_watching or event in _ALLOWED or len(self.events) > 9:
            return
        if event in ("open", "os.open"):
            name, mode, flags = (*args, None, None)[:3]
            # A file that is open already is given by its number.
            if isinstance(name, int):
                return
            is_read = not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
            path = os.path.abspath(os.fsdecode(name))
            if path.startswith(self._place) and is_read and (mode is None or "r" in str(mode)):
                return
        self.events.append(f"{event} {args!r}"[:300])


def limit_addresses() -> None:
    """Let this process have so many more bytes of addresses, and no core files."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + _MOST_ADDRESSES_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def reset_peak() -> None:
    """Forget the most memory that this process has had."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    """Return the most memory that this process has had since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
