"""Where rings lie, and who removes them.

`<base>/<job>/rank-RRRRR.ring`; the base is /dev/shm/keepstep-<uid>, or KEEPSTEP_MONITOR_DIR. Directories have mode 0700, and a base that
belongs to another user or that others may write to is refused: /dev/shm is open to all.

Who removes: a worker leaves its ring behind, whatever ends it, for that is what rings are for. A new worker of the same rank puts its
own in the place of the old one by rename, so that whoever reads the old one keeps it whole. What nobody replaces is removed by the
node's monitor some time after the process has died (`Sweeper`). Without a monitor they stay until the node restarts: 1.5 MiB a rank
of each job's name.
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
from keepstep.monitor.telemetry.ring import Ring, RingSizes, WorkerIdentity
from keepstep.monitor.telemetry.ring_reader import RingReader

_log = logging.getLogger(__name__)
DIRECTORY_VARIABLE = "KEEPSTEP_MONITOR_DIR"
_RING_NAME = re.compile(r"rank-\d{5,}\.ring")


def base_directory() -> Path:
    """Return where the rings of all this user's jobs on this node lie."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or f"/dev/shm/keepstep-{os.getuid()}")


def job_directory(job: str) -> Path:
    """Return where a job's rings lie on this node."""
    # A job may be named like a path. What does not bear its own name bears a digest of it: `a/b` is not `a_b`.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:128]
    if name != job or not name.strip("."):
        name = f"{name}-{hashlib.sha256(os.fsencode(job)).hexdigest()[:12]}"
    return base_directory() / name


def recorded_jobs() -> tuple[str, ...]:
    """Return the jobs of this user that have rings on this node, as their directories are named."""
    try:
        return tuple(
            sorted(
                name for name in os.listdir(base_directory()) if ring_paths(base_directory() / name)
            )
        )
    except OSError:
        return ()


def ring_paths(directory: Path) -> list[Path]:
    """Return the rings of a job's directory, by rank; none if it does not exist."""
    try:
        found = [directory / name for name in os.listdir(directory) if _RING_NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda path: (len(path.name), path.name))


def create_ring(identity: WorkerIdentity, sizes: RingSizes | None = None) -> Ring:
    """Make this worker's ring, in the place of whatever a former worker of the same rank left.

    Raises:
        RingUnwritable: no room, no right, or a directory that others could write to.
    """
    directory = job_directory(identity.job)
    try:
        for place in (directory.parent, directory):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(place)
        path = directory / f"rank-{identity.rank:05d}.ring"
        # Named by time as well, for a process killed while it was here would leave a name that a later one with its id could not take.
        unfinished = directory / f".rank-{identity.rank:05d}.{os.getpid()}.{time.monotonic_ns()}"
        ring = Ring.create(unfinished, identity, sizes)
        _warn_if_in_use(path, identity)
        os.rename(unfinished, path)
    except OSError as error:
        raise RingUnwritable(
            f"rank {identity.rank}: no telemetry ring in {directory}: {error}"
        ) from error
    ring.path = path
    return ring


def _warn_if_in_use(path: Path, identity: WorkerIdentity) -> None:
    """Warn if the ring that is about to be replaced is in use: two jobs that bear one name take each other's."""
    try:
        reader = RingReader(path)
    except (RingUnreadable, OSError):
        return
    try:
        # Ranks are handed out anew with a generation: then the one who had this one before has another ring now, or will soon.
        is_in_use = (
            reader.process != os.getpid() and reader.is_alive() and reader.ending == Ending.NONE
        )
        if is_in_use and reader.identity.generation >= identity.generation:
            _log.warning(
                "rank %d of job %s: process %d on this node has this name too, and is not watched any more. "
                "If that is another job, set KEEPSTEP_JOB to a name of its own for each.",
                identity.rank, identity.job, reader.process,
            )  # fmt: skip
    finally:
        reader.close()


def _refuse_foreign(directory: Path) -> None:
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RingUnwritable(
            f"{directory} is not a directory that only this user may write to (owner {status.st_uid}, "
            f"mode {stat.filemode(status.st_mode)}): remove it, or set {DIRECTORY_VARIABLE}"
        )


class Sweeper:
    """Removes rings whose processes have died, some time after it first saw that; a job's directory with the last of them.

    Args:
        keep_s: how long a dead process's ring is kept. Long enough for a verdict, and for someone to look.
    """

    def __init__(self, keep_s: float = 3600.0) -> None:
        self._keep_s = keep_s
        self._dead_since: dict[tuple[Path, int], float] = {}

    def sweep(self, directories: Iterable[Path], now_s: float) -> list[Path]:
        """Look once; return what was removed. Files that are no rings are left alone."""
        removed = []
        dead: dict[tuple[Path, int], float] = {}
        for directory in directories:
            for path in ring_paths(directory):
                inode = _dead_ring(path)
                if inode is None:
                    continue
                since = self._dead_since.get((path, inode), now_s)
                if now_s - since < self._keep_s:
                    dead[path, inode] = since
                elif _remove(path, inode):
                    removed.append(path)
            if removed and removed[-1].parent == directory:
                try:
                    directory.rmdir()
                except OSError:
                    pass  # Others' rings are in it.
        self._dead_since = dead
        return removed


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
    """Remove the ring with this inode, and not one that a new worker has put in its place in the meantime."""
    aside = path.with_name(f".removed-{path.name}.{os.getpid()}")
    try:
        os.rename(path, aside)
        try:
            if os.lstat(aside).st_ino == inode:
                return True
            # A new worker was faster: its ring goes back, unless a newer one still is there.
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(aside)
    except FileNotFoundError:
        pass
    return False
