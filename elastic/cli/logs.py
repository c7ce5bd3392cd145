"""Implements `keepstep logs` for a job that does not run: prints the log files of this folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.local_jobs import local_jobs
from keepstep.elastic.worker.log_files import DEFAULT_DIRECTORY, LogFile, log_files

_CHECK_EVERY_S = 0.5
_READ_NBYTES = 2**16


def print_log(directory: Path, rank: int | None, since: int | None) -> None:
    """Print a rank's output.

    Args:
        directory: of the job's files.
        rank: the rank; None: the lowest that has a file.
        since: the first generation; None: the newest in which the rank has a file.

    Raises:
        UsageError: there is no such file.
    """
    for file in chosen_files(directory, rank, since):
        _print_from(file.path, 0)


def follow_log(directory: Path, rank: int | None, since: int | None) -> None:
    """Follow a rank's output, into later generations too, until interrupted.

    Raises:
        UsageError: there is no such file.
    """
    printed: dict[Path, int] = {}
    try:
        while True:
            # Older files, too: they may have grown since they were printed last.
            for path in [*printed, *(file.path for file in chosen_files(directory, rank, since))]:
                printed[path] = _print_from(path, printed.get(path, 0))
            time.sleep(_CHECK_EVERY_S)
    except KeyboardInterrupt:
        return


def local_job(job: str | None, root: Path) -> str | None:
    """Return the name of the job if it runs on this machine; None if it does not.

    Args:
        job: name of the job; None: the one that wrote last, else the only one that runs here.
        root: where `keepstep run` was called.
    """
    running = {entry.job for entry in local_jobs()}
    home = root / DEFAULT_DIRECTORY
    if job is None and any(map(log_files, home.iterdir() if home.is_dir() else ())):
        job = find_directory(None, root).name
    if job is None and len(running) == 1:
        return running.pop()
    return job if job in running else None


def find_directory(job: str | None, root: Path) -> Path:
    """Return the directory of a job's files.

    Args:
        job: name of the job; None: the one that wrote last.
        root: where `keepstep run` was called.

    Raises:
        UsageError: no job has files there.
    """
    home = root / DEFAULT_DIRECTORY
    if job is not None:
        return home / job
    written = {
        directory: newest_s
        for directory in (home.iterdir() if home.is_dir() else ())
        if (newest_s := max(map(_written_s, log_files(directory)), default=0.0))
    }
    if not written:
        raise _nothing_in(home)
    return max(written, key=lambda directory: written[directory])


def chosen_files(directory: Path, rank: int | None, since: int | None) -> list[LogFile]:
    """Return the files of a rank: those of each generation together, stdout first.

    They are of the newest generation in which it has any; given `since`, of that and later ones.

    Raises:
        UsageError: the rank has none.
    """
    files = log_files(directory)
    if not files:
        raise _nothing_in(directory)
    ranks = sorted({file.rank for file in files})
    chosen = ranks[0] if rank is None else rank
    if chosen not in ranks:
        shown = ", ".join(map(str, ranks))
        raise UsageError(
            f"{directory} has no output of rank {chosen}, but of {shown}; another node has it, or "
            "--redirects and --tee name other local ranks"
        )
    own = [file for file in files if file.rank == chosen]
    first = max(file.generation for file in own) if since is None else since
    return sorted(
        (file for file in own if file.generation >= first),
        key=lambda file: (file.generation, file.stream == "stderr"),
    )


def _written_s(file: LogFile) -> float:
    return file.path.stat().st_mtime


def _nothing_in(directory: Path) -> UsageError:
    return UsageError(
        f"{directory} has no output of workers: it goes to the terminal of `keepstep run` unless "
        "that is given --tee 3 (to files as well) or --redirects 3 (to files only). Run this where "
        "that was called; what --log-dir was given is read there"
    )


def _print_from(path: Path, start: int) -> int:
    """Print a file's bytes from `start`; return where they end."""
    with path.open("rb") as file:
        file.seek(start)
        for piece in _pieces(file.fileno()):
            sys.stdout.buffer.write(piece)
            start += len(piece)
    sys.stdout.flush()
    return start


def _pieces(descriptor: int) -> Iterator[bytes]:
    while piece := os.read(descriptor, _READ_NBYTES):
        yield piece
