"""Places ring files in directories, and removes those of dead processes.

A ring lies at `<base>/<job>/rank-RRRRR.ring`; the base is /dev/shm/keepstep-<uid>, or
KEEPSTEP_MONITOR_DIR. Directories have mode 0700. A base that belongs to another user or that others
may write to is refused, because /dev/shm is open to all users.

A worker leaves its ring behind however it ends, so that it can be read then. A new worker of the
same rank replaces it by a rename, so that readers of the old ring keep its content. The node's
monitor removes rings that are not replaced some time after the process has died (`Sweeper`).
Without a monitor they remain until the node restarts: 1.5 MiB for each rank of each job's name.

A process that is killed while it creates a ring, or removes one, leaves it under a name that begins
with a dot; it is removed in the same way.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from keepstep.monitor.errors import RingUnreadable, RingUnwritable
from keepstep.monitor.records import Ending
from keepstep.monitor.telemetry.ring import Ring, RingSizes, WorkerIdentity, process_started
from keepstep.monitor.telemetry.ring_reader import RingReader

_log = logging.getLogger(__name__)
DIRECTORY_VARIABLE = "KEEPSTEP_MONITOR_DIR"
_RING_NAME = re.compile(r"rank-\d{5,}\.ring")
_UNFINISHED_NAME = re.compile(r"\.rank-\d{5,}\.(?P<process>\d+)-(?P<started>\d+)\.\d+")
_REMOVED_NAME = re.compile(r"\.removed-rank-\d{5,}\.ring\.\d+\.\d+")


def base_directory() -> Path:
    """Return the directory of the rings of all this user's jobs on this node."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or f"/dev/shm/keepstep-{os.getuid()}")


def job_directory(job: str) -> Path:
    """Return the directory of a job's rings on this node."""
    # A job's name may look like a path. A directory whose name had to be changed carries a digest
    # of the original: `a/b` and `a_b` differ.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:128]
    if name != job or not name.strip("."):
        name = f"{name}-{hashlib.sha256(os.fsencode(job)).hexdigest()[:12]}"
    return base_directory() / name


def recorded_jobs() -> tuple[str, ...]:
    """Return the jobs of this user that have rings on this node, as their directories are named."""
    try:
        names = os.listdir(base_directory())
    except OSError:
        return ()
    return tuple(sorted(name for name in names if _has_rings(base_directory() / name)))


def running_jobs() -> tuple[str, ...]:
    """Return the recorded jobs that have a living process; one that was killed leaves its rings."""
    return tuple(name for name in recorded_jobs() if _is_running(base_directory() / name))


def _is_running(directory: Path) -> bool:
    try:
        return any(_is_alive(path) for path in ring_paths(directory))
    except RingUnreadable:
        return False


def _is_alive(path: Path) -> bool:
    try:
        reader = RingReader(path)
    except (RingUnreadable, OSError):
        return False
    try:
        return reader.is_alive()
    finally:
        reader.close()


def _has_rings(directory: Path) -> bool:
    try:
        return bool(ring_paths(directory))
    except (OSError, RingUnreadable):
        return False


def ring_paths(directory: Path) -> list[Path]:
    """Return the rings of a job's directory, by rank; none if it does not exist.

    Raises:
        RingUnreadable: others could have put rings there, or in the directory above it.
    """
    paths = [path for path in _files(directory) if _RING_NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def _files(directory: Path) -> list[Path]:
    """Return what is in a directory that only this user may write to. Raises as `ring_paths`."""
    try:
        for place in (directory.parent, directory):
            if reason := _foreign_reason(place):
                raise RingUnreadable(f"{reason}: no ring is read from it")
        return [directory / name for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def create_ring(identity: WorkerIdentity, sizes: RingSizes | None = None) -> Ring:
    """Create this worker's ring; it replaces the ring of a previous worker of the same rank.

    Raises:
        RingUnwritable: no space, no permission, or a directory that others could write to.
    """
    directory = job_directory(identity.job)
    try:
        for place in (directory.parent, directory):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(place)
        path = directory / f"rank-{identity.rank:05d}.ring"
        # Killed at this point, the process leaves the file behind; a sweep finds out whose it is.
        # The time, for the same process may have failed here before.
        process = f"{os.getpid()}-{process_started(os.getpid())}"
        unfinished = directory / f".rank-{identity.rank:05d}.{process}.{time.monotonic_ns()}"
        ring = Ring.create(unfinished, identity, sizes)
        _warn_if_in_use(path, identity)
        os.rename(unfinished, path)
    except OSError as error:
        raise RingUnwritable(
            f"rank {identity.rank}: a telemetry ring cannot be created in {directory}: {error}"
        ) from error
    ring.path = path
    return ring


def _warn_if_in_use(path: Path, identity: WorkerIdentity) -> None:
    """Warn if the ring to be replaced is in use: two jobs of one name share their rings."""
    try:
        reader = RingReader(path)
    except (RingUnreadable, OSError):
        return
    try:
        # A new generation assigns ranks again; the previous worker of this rank then has another
        # ring already, or will soon.
        is_in_use = (
            reader.process != os.getpid() and reader.is_alive() and reader.ending == Ending.NONE
        )
        if is_in_use and reader.identity.generation >= identity.generation:
            _log.warning(
                "rank %d of job %s: process %d on this node has the same job name and rank, and is "
                "no longer monitored. If it belongs to another job, give each job its own name "
                "with KEEPSTEP_JOB.",
                identity.rank, identity.job, reader.process,
            )  # fmt: skip
    finally:
        reader.close()


def _refuse_foreign(directory: Path) -> None:
    if reason := _foreign_reason(directory):
        raise RingUnwritable(f"{reason}: remove it, or set {DIRECTORY_VARIABLE}")


def _foreign_reason(directory: Path) -> str | None:
    """Return why a directory is not to be used; None if only this user may write to it."""
    status = os.lstat(directory)
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if is_own and not status.st_mode & 0o022:
        return None
    return (
        f"{directory} is not a directory that only this user may write to (owner "
        f"{status.st_uid}, mode {stat.filemode(status.st_mode)})"
    )


class Sweeper:
    """Removes rings of dead processes after a time, and a job's directory with its last ring.

    Unfinished files of a process are removed as its ring would be.

    Args:
        keep_s: how long the ring is kept after its process was first found dead: long enough for a
            verdict, and for a person to look at it.
    """

    def __init__(self, keep_s: float = 3600.0) -> None:
        self._keep_s = keep_s
        self._dead_since: dict[tuple[Path, int], float] = {}

    def sweep(self, directories: Iterable[Path], now_s: float) -> list[Path]:
        """Check all rings once, finished or not; return those that were removed.

        Other files are left alone, and so are directories that others may write to.
        """
        removed = []
        dead: dict[tuple[Path, int], float] = {}
        for directory in directories:
            try:
                leftovers = _dead_files(directory)
            except RingUnreadable:
                continue
            for path, inode in leftovers:
                since = self._dead_since.get((path, inode), now_s)
                if now_s - since < self._keep_s:
                    dead[path, inode] = since
                elif _remove(path, inode):
                    removed.append(path)
            if removed and removed[-1].parent == directory:
                try:
                    directory.rmdir()
                except OSError:
                    pass  # Other rings are in it.
        self._dead_since = dead
        return removed


def _dead_files(directory: Path) -> list[tuple[Path, int]]:
    """Return the rings of dead processes, and what these left unfinished, with their inodes.

    Raises:
        RingUnreadable: as `ring_paths` does.
    """
    leftovers: list[tuple[Path, int | None]] = []
    for path in sorted(_files(directory)):
        if unfinished := _UNFINISHED_NAME.fullmatch(path.name):
            if process_started(int(unfinished["process"])) != int(unfinished["started"]):
                leftovers.append((path, _inode(path)))
        elif _RING_NAME.fullmatch(path.name) or _REMOVED_NAME.fullmatch(path.name):
            leftovers.append((path, _dead_ring(path)))
    return [(path, inode) for path, inode in leftovers if inode is not None]


def _inode(path: Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def _dead_ring(path: Path) -> int | None:
    """Return the inode of a ring whose process has died, else None."""
    try:
        reader = RingReader(path)
    except (RingUnreadable, OSError):
        return None
    try:
        return None if reader.is_alive() else reader.inode
    finally:
        reader.close()


def _remove(path: Path, inode: int) -> bool:
    """Remove the file with this inode, but not a ring that a new worker has replaced it by."""
    if not _RING_NAME.fullmatch(path.name):
        path.unlink(missing_ok=True)  # Its name is never used again.
        return True
    aside = path.with_name(f".removed-{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        os.rename(path, aside)
        try:
            if os.lstat(aside).st_ino == inode:
                return True
            # A new worker has replaced the ring: move its ring back, unless a still newer one
            # exists.
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(aside)
    except FileNotFoundError:
        pass
    return False
