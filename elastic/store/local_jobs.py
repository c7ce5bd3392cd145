"""Registers the jobs on this machine that started their own coordinator.

With it `keepstep status` finds the coordinator without an address. There is one small file per job
in the user's runtime directory. The agent holds it, and removes it when it ends; a file that nobody
holds is ignored and removed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Address, parse_address
from keepstep.private_files import (
    NotPrivate,
    check_directory,
    created_directory,
    held_file,
    is_held,
    read_file,
    runtime_directory,
)


class LocalJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job on this machine.

    Args:
        job: its name.
        store: the URL of its coordinator.
        pid: the process id of the agent that runs the coordinator.
        secret_file: file with the coordinator's secret; None: this user's own.
    """

    job: str
    store: str
    pid: int
    secret_file: str | None = None

    @property
    def address(self) -> Address:
        """The coordinator's address."""
        return parse_address(self.store, Path(self.secret_file) if self.secret_file else None)


@contextmanager
def registered(job: str, address: Address, member: str = "") -> Iterator[None]:
    """Register the job under its name while the context lasts.

    Args:
        job: its name.
        address: of its coordinator.
        member: the member of this agent, if the coordinator has several.

    Raises:
        UsageError: a job of that name already runs on this machine, or the directory of
            registrations is not private.
    """
    for other in local_jobs():
        if other.job == job and not (member and other.store == address.url):
            raise UsageError(
                f"a job named {job!r} already runs on this machine (process {other.pid}); "
                f"choose another --job name, or join it with --store {other.store}"
            )
    secret_file = None if address.secret_file is None else str(address.secret_file.absolute())
    entry = LocalJob(job=job, store=address.url, pid=os.getpid(), secret_file=secret_file)
    try:
        path = _path(job, member)
    except NotPrivate as error:
        raise UsageError(str(error)) from error
    # Monitors read the directory every other second, and must not find a partial file.
    with held_file(path, msgspec.json.encode(entry)):
        yield


def local_jobs() -> tuple[LocalJob, ...]:
    """Return the jobs whose agents live, each once. Needs no permission to write.

    Raises:
        UsageError: the directory of registrations belongs to another user, or others may use it.
    """
    directory = runtime_directory() / "jobs"
    try:
        check_directory(directory.parent)
        check_directory(directory)
    except FileNotFoundError:
        return ()
    except NotPrivate as error:
        raise UsageError(str(error)) from error
    jobs: list[LocalJob] = []
    for path in sorted(directory.glob("*.json")):
        try:
            entry = msgspec.json.decode(read_file(path), type=LocalJob)
            is_alive = is_held(path)
        except (OSError, NotPrivate, msgspec.MsgspecError, ValueError):
            continue  # The job has just ended, or the file is not ours.
        if is_alive:
            # Several members of one coordinator may be on this machine.
            if all((entry.job, entry.store) != (other.job, other.store) for other in jobs):
                jobs.append(entry)
        else:
            with suppress(OSError):
                path.unlink()
    return tuple(jobs)


def _path(job: str, member: str) -> Path:
    created_directory(runtime_directory())
    directory = created_directory(runtime_directory() / "jobs")
    # A job's name may hold a slash, or be longer than a file's name; the digest keeps two distinct.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:128]
    digest = hashlib.sha256(os.fsencode(f"{job}\0{member}" if member else job)).hexdigest()[:12]
    return directory / f"{name}-{digest}.json"
