"""Reads limits and usage of the cgroup that a process is in.

Supports version 2, version 1, and both at once, as systemd's hybrid mounts are. Every value is
optional: a file that is missing or contains "max" is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Version 1 reports no limit as the largest multiple of the page size that fits in 63 bits.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupFiles:
    """Directories of a cgroup's files; None where that hierarchy is not mounted.

    Args:
        unified: of version 2.
        cpu, memory: of version 1.
    """

    unified: Path | None
    cpu: Path | None
    memory: Path | None


def find(
    process: int | str = "self", proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")
) -> CgroupFiles:
    """Return the directories of a process's cgroup.

    Within a container the path that the kernel reports may lie outside of what is mounted; then
    the root of the mount is the cgroup.
    """
    unified = cpu = memory = None
    try:
        lines = (proc / str(process) / "cgroup").read_text().splitlines()
    except OSError:
        return CgroupFiles(None, None, None)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if not controllers:
            for top in (mount, mount / "unified"):
                if unified is None and (top / "cgroup.controllers").exists():
                    unified = _path_under(top, path)
        elif "cpu" in names:
            cpu = _first_existing_under(mount, ("cpu", controllers, "cpu,cpuacct"), path)
        elif "memory" in names:
            memory = _first_existing_under(mount, ("memory",), path)
    return CgroupFiles(unified, cpu, memory)


@dataclass(frozen=True, slots=True, order=True)
class CpuTime:
    """Processor seconds of a cgroup so far, both summed over processors.

    Args:
        throttled_s: that its quota denied.
        used_s: that it had; 0.0 if not known.
    """

    throttled_s: float = 0.0
    used_s: float = 0.0


def cpu_time(files: CgroupFiles) -> CpuTime | None:
    """Return the processor time that the cgroup had and was denied; None without a quota."""
    if files.unified is not None:
        stat = _table(files.unified / "cpu.stat")
        if "throttled_usec" in stat:
            return CpuTime(stat["throttled_usec"] / 1e6, stat.get("usage_usec", 0) / 1e6)
    if files.cpu is not None:
        stat = _table(files.cpu / "cpu.stat")
        if "throttled_time" in stat:
            used_ns = _number(files.cpu / "cpuacct.usage") or 0
            return CpuTime(stat["throttled_time"] / 1e9, used_ns / 1e9)
    return None


def memory_limit_nbytes(files: CgroupFiles) -> int | None:
    """Return the cgroup's memory limit; None without one."""
    for path in _memory_files(files, "memory.max", "memory.limit_in_bytes"):
        limit = _number(path)
        if limit is not None and limit < _NO_LIMIT:
            return limit
    return None


def memory_held_nbytes(files: CgroupFiles) -> int | None:
    """Return the memory that the cgroup cannot free at once: usage without inactive file pages."""
    for usage_path, directory in zip(
        _memory_files(files, "memory.current", "memory.usage_in_bytes"),
        [directory for directory in (files.unified, files.memory) if directory is not None],
        strict=True,
    ):
        usage = _number(usage_path)
        if usage is not None:
            stat = _table(directory / "memory.stat")
            return max(0, usage - stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    return None


def _memory_files(files: CgroupFiles, name_in_v2: str, name_in_v1: str) -> list[Path]:
    paths = [files.unified / name_in_v2] if files.unified is not None else []
    return [*paths, files.memory / name_in_v1] if files.memory is not None else paths


def _first_existing_under(mount: Path, names: tuple[str, ...], path: str) -> Path | None:
    for name in names:
        if (mount / name).is_dir():
            return _path_under(mount / name, path)
    return None


def _path_under(top: Path, path: str) -> Path:
    inside = top / path.lstrip("/")
    return inside if inside.is_dir() else top


def _text(path: Path) -> str:
    # `open` rather than `Path.read_text`, which costs more than the reading itself.
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _table(path: Path) -> dict[str, int]:
    pairs = [line.split() for line in _text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
