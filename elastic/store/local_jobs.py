"""Registers the jobs on this machine that started their own coordinator.

With it `keepstep status` finds the coordinator without an address. There is one small file per job
in the user's runtime directory. The agent removes it when it ends; a file whose process is gone is
ignored and removed.
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
    """A job, the URL of its coordinator and the process id of its agent."""

    job: str
    store: str
    pid: int


def runtime_directory() -> Path:
    """Return this user's private directory for sockets and registrations; create it if needed."""
    path = _runtime_path()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(path)
    return path


@contextmanager
def registered(job: str, store: str) -> Iterator[None]:
    """Register the job under its name while the context lasts.

    Raises:
        UsageError: a job of that name already runs on this machine.
    """
    for other in local_jobs():
        if other.job == job:
            raise UsageError(
                f"a job named {job!r} already runs on this machine (process {other.pid}); "
                f"choose another --job name, or join it with --store {other.store}"
            )
    path = _path(job)
    # Monitors read the directory every other second; the rename keeps them from a partial file.
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps({"job": job, "store": store, "pid": os.getpid()}))
    os.replace(partial, path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def local_jobs() -> tuple[LocalJob, ...]:
    """Return the jobs whose process is alive. Needs no permission to write."""
    directory = _runtime_path()
    if not directory.exists():
        return ()
    _refuse_foreign(directory)
    jobs = []
    for path in sorted((directory / "jobs").glob("*.json")):
        try:
            entry = LocalJob(**json.loads(path.read_text()))
        except FileNotFoundError:
            continue  # The job has just ended.
        if psutil.pid_exists(entry.pid):
            jobs.append(entry)
        else:
            with suppress(OSError):
                path.unlink()
    return tuple(jobs)


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
