"""Which jobs were started on this machine with a coordinator of their own, so that `keepstep status` needs no address.

One small file per job in the user's runtime directory, removed when its agent ends; a file whose process is gone is ignored and removed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from keepstep.elastic.errors import UsageError


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job, its coordinator's URL and the process that keeps it."""

    job: str
    store: str
    pid: int


def runtime_directory() -> Path:
    """Return this user's private directory for sockets and registrations, making it if need be."""
    path = _runtime_path()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(path)
    return path


@contextmanager
def registered(job: str, store: str) -> Iterator[None]:
    """Have the job found under its name while the context lasts.

    Raises:
        UsageError: a job of that name already runs here.
    """
    for other in local_jobs():
        if other.job == job:
            raise UsageError(
                f"a job named {job!r} already runs on this machine (process {other.pid}); "
                f"choose another --job name, or join it with --store {other.store}"
            )
    path = _path(job)
    # Monitors look every other second, and are to find it whole.
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps({"job": job, "store": store, "pid": os.getpid()}))
    os.replace(beside, path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def local_jobs() -> tuple[LocalJob, ...]:
    """Return the jobs whose process is alive. Nothing is made: whoever looks need not be allowed to write."""
    directory = _runtime_path()
    if not directory.exists():
        return ()
    _refuse_foreign(directory)
    found = []
    for path in sorted((directory / "jobs").glob("*.json")):
        try:
            entry = LocalJob(**json.loads(path.read_text()))
        except FileNotFoundError:
            continue  # It has just ended.
        if psutil.pid_exists(entry.pid):
            found.append(entry)
        else:
            with suppress(OSError):
                path.unlink()
    return tuple(found)


def _runtime_path() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return (
        Path(base) / "keepstep" if base else Path(tempfile.gettempdir()) / f"keepstep-{os.getuid()}"
    )


def _refuse_foreign(directory: Path) -> None:
    if directory.stat().st_uid != os.getuid():
        raise UsageError(
            f"{directory} belongs to another user; set XDG_RUNTIME_DIR to a directory of your own"
        )


def _path(job: str) -> Path:
    directory = runtime_directory() / "jobs"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / f"{job.replace('/', '_')}.json"
