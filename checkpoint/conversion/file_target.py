"""Files that a conversion writes, on disks and in object stores: visible only when complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import fsspec

from keepstep.checkpoint.errors import CheckpointError, CheckpointExists
from keepstep.checkpoint.stored.urls import parse_url


@contextmanager
def new_file(url: str, verify: Callable[[str], None] = lambda written: None) -> Iterator[IO[bytes]]:
    """Open a file that must not exist yet, to write it from beginning to end; durable at the end.

    Args:
        url: a path, `file://`, `s3://bucket/key` or `gs://bucket/key`.
        verify: called with the URL of what was written; raises if that is to be deleted. A disk's
            file has its name only after that.

    Raises:
        CheckpointExists: there is such a file.
        CheckpointError: it cannot be written, the URL has a part that no storage has, or the
            package that writes to its object store is not installed.
    """
    parsed = parse_url(url)
    path = parsed.local_path
    if path is not None:
        with _new_local_file(path) as unfinished:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            verify(str(unfinished))
        return
    system, remote = _file_system(url, parsed.scheme), f"{parsed.bucket}{parsed.path}"
    try:
        if system.exists(remote):
            raise _exists(url)
        # What is written becomes visible when the upload is completed, at `close`.
        file = system.open(remote, "wb")
        try:
            yield file
        except BaseException:
            file.discard()
            raise
        file.close()
        try:
            verify(url)
        except BaseException:
            system.rm_file(remote)
            raise
    except OSError as error:
        raise CheckpointError(f"{url} cannot be written: {error}") from error


def _file_system(url: str, scheme: str) -> fsspec.AbstractFileSystem:
    """Return fsspec's file system for a scheme.

    Raises:
        CheckpointError: there is none, or its package is not installed.
    """
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        # What fsspec says names the package, such as gcsfs.
        raise CheckpointError(
            f"{url} cannot be written: {error}; or write to a disk, and copy the file"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{url} cannot be written: {error}; use a path, file://, s3:// or gs://"
        ) from error


@contextmanager
def _new_local_file(path: Path) -> Iterator[Path]:
    """Yield the path to write to; it gets the name `path` when the block ends without an error.

    Raises:
        CheckpointExists: there is such a file.
        CheckpointError: it cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        if path.exists():
            raise _exists(str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield unfinished
            # Unlike `rename`, it does not replace what another process has written meanwhile.
            _link(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        _flush_directory(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}; make room or choose another place"
        ) from error


def _link(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise _exists(str(path)) from None


def _flush_directory(directory: Path) -> None:
    """Make the names of a directory durable against a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exists(url: str) -> CheckpointExists:
    return CheckpointExists(f"{url} exists, and is never overwritten; remove it, or give another")
