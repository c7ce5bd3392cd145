"""Decides how much memory the node can still give to snapshots and parity.

What the system calls available shrinks only when memory is written. So buffers that were given and
are not written yet count as taken: else each of several ranks would be given what is there once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from keepstep.checkpoint.snapshot.memory.arena import Arena

# Version 1 of cgroups reports no limit as the largest multiple of the page size below 2^63.
_NO_LIMIT = 1 << 60


def available_nbytes() -> int:
    """Return the memory that this process can have: the node's, or less if a cgroup limits it."""
    node_nbytes = int(psutil.virtual_memory().available)
    cgroup_nbytes = cgroup_available_nbytes()
    return node_nbytes if cgroup_nbytes is None else min(node_nbytes, cgroup_nbytes)


def cgroup_available_nbytes(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return what is left of the memory of this process's cgroup and of those above it.

    Pages of files that the kernel can drop count as left. None if nothing limits the process.

    Args:
        membership: the process's file that names its cgroups.
        mount: where cgroups are mounted, version 1 or 2.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Hybrid systems mount version 2 one level below.
            top = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
            names = ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top = mount / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # In a container the path may lie outside of what is mounted: the mount is the cgroup then.
        directory = top / path.lstrip("/")
        while directory != top.parent:
            nbytes = _left_in(directory, *names)
            if nbytes is not None:
                left.append(nbytes)
            directory = directory.parent
    return min(left, default=None)


def _left_in(directory: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    """Return what is left of one cgroup's memory; None if it has no limit."""
    try:
        limit, usage = (
            (directory / limit_name).read_text().strip(),
            (directory / usage_name).read_text().strip(),
        )
        if not limit.isdigit() or int(limit) >= _NO_LIMIT:
            return None
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        dropped = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        return max(0, int(limit) - int(usage) + dropped)
    except (OSError, ValueError):
        return None


class MemoryBudget:
    """The memory of one node's snapshot server. Thread-safe.

    Args:
        read_available_nbytes: returns what the system has left.
    """

    def __init__(self, read_available_nbytes: Callable[[], int] = available_nbytes) -> None:
        self._read_available_nbytes = read_available_nbytes
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        # Held while somebody decides on what is left and takes it.
        self._lock = threading.RLock()

    @contextmanager
    def admission(self) -> Iterator[Callable[[], int]]:
        """Yield what returns the bytes that can be given, which it asks the system for.

        Nobody else is given any while the context lasts.
        """
        with self._lock:
            yield self._left_nbytes

    def create(self, nbytes: int) -> Arena:
        """Create a buffer, which counts as taken from now on."""
        with self._lock:
            arena = Arena.create(nbytes)
            self._arenas.add(arena)
            return arena

    def _left_nbytes(self) -> int:
        given = sum(arena.unwritten_nbytes for arena in self._arenas)
        return self._read_available_nbytes() - given
