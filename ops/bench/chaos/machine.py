"""Finds which faults this machine permits, and gives the campaign mounts of its own.

`isolate` moves this process into a mount namespace of its own, with an empty /dev/shm: nothing that
is mounted there is seen outside, and the kernel removes it when the last process in it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from pathlib import Path

from ops.bench.chaos.schedule import Ability
from ops.bench.switched_network import is_possible as can_have_network

_CLONE_NEWNS = 0x20000
_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


def isolate() -> bool:
    """Enter a mount namespace with an empty /dev/shm; return whether this is permitted."""
    if os.geteuid() != 0:
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return False
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
    ):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return False
    return True


def abilities(*, isolated: bool, has_objects: bool) -> set[Ability]:
    """Return what the faults of one seed may use."""
    found = {Ability.OBJECTS if has_objects else Ability.FILES}
    if isolated and can_have_network() and shutil.which("nsenter"):
        found.add(Ability.NETWORK)
    if isolated and _can_mount():
        found.add(Ability.FILE_SYSTEM)
    if _can_limit_memory():
        found.add(Ability.MEMORY_GROUP)
    return found


class FileSystem:
    """A small ext4 file system in a file, mounted in a folder."""

    def __init__(self, image: Path, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        _run("mount", "-o", "loop", str(image), str(folder))
        shutil.rmtree(folder / "lost+found")

    def set_writable(self, is_writable: bool) -> bool:
        """Remount it; return False while the kernel refuses, as it does where a file is written."""
        mode = "rw" if is_writable else "ro"
        command = ["mount", "-o", f"remount,{mode}", str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def freeze(self, seconds: float) -> subprocess.Popen[bytes]:
        """Let every write wait for some seconds; another process thaws it, whatever happens here.

        Processes that write to a frozen file system cannot be killed.
        """
        command = 'fsfreeze -f "$1"; sleep "$2"; fsfreeze -u "$1"'
        return subprocess.Popen(
            ["sh", "-c", command, "sh", str(self.folder), str(seconds)], start_new_session=True
        )

    def unmount(self) -> None:
        """Unmount it; the loop device is released."""
        _run("umount", "-l", str(self.folder))


class MemoryGroup:
    """A memory control group for the processes of one node."""

    def __init__(self, name: str) -> None:
        self.path = _own_memory_group() / f"keepstep-chaos-{os.getpid()}-{name}"
        self.path.mkdir(exist_ok=True)

    @property
    def processes(self) -> Path:
        """The file that takes the ids of processes that enter the group."""
        return self.path / "cgroup.procs"

    def squeeze(self, spare: int) -> None:
        """Leave the group's processes `spare` bytes more than they use."""
        used = int((self.path / "memory.usage_in_bytes").read_text())
        (self.path / "memory.limit_in_bytes").write_text(str(used + spare))

    def release(self) -> None:
        """End the limit."""
        (self.path / "memory.limit_in_bytes").write_text("-1")

    def remove(self) -> None:
        """Remove the group, which has no process any more."""
        self.path.rmdir()


def _own_memory_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _MEMORY_GROUPS / path.lstrip("/")
    return _MEMORY_GROUPS


def _can_limit_memory() -> bool:
    path = _own_memory_group() / f"keepstep-chaos-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError:
        return False
    usable = (path / "memory.limit_in_bytes").exists()
    path.rmdir()
    return usable


def _can_mount() -> bool:
    commands = ("mkfs.ext4", "fsfreeze", "mount", "umount")
    return all(map(shutil.which, commands)) and Path("/dev/loop-control").exists()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
