"""Reads how much memory this process can still have, of its node's and of its cgroups'."""

from __future__ import annotations

from pathlib import Path

import psutil

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
    """Return the memory left in this process's cgroup and in those above it.

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
        # In a container the path may lie outside the mount: then the mount is the cgroup.
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
