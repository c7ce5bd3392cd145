"""Writes files of a conversion, on disks and in object stores: visible only when complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import fsspec

from keepstep.checkpoint.errors import CheckpointError, CheckpointExists
from keepstep.checkpoint.format.layout.integers import ceil_div, round_up
from keepstep.checkpoint.format.stored.urls import parse_url

_MOST_PARTS = 9000
"""Somewhat fewer than the 10,000 that S3 makes an object of."""
_LEAST_PART_NBYTES = 50 * 2**20


@contextmanager
def new_file(
    url: str, verify: Callable[[str], None] = lambda written: None, *, nbytes: int
) -> Iterator[IO[bytes]]:
    """Open a file that must not exist yet, to write it from beginning to end; durable at the end.

    Args:
        url: a path, `file://`, `s3://bucket/key` or `gs://bucket/key`.
        verify: called with the URL of what was written; raises if that is to be deleted. A disk's
            file has its name only after that.
        nbytes: how many bytes will be written.

    Raises:
        CheckpointExists: there is such a file, or there is one when it is complete.
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
        # What is written becomes visible when the upload is completed, at `close`, which fails if
        # another process has written meanwhile.
        file = system.open(remote, "xb", block_size=_part_nbytes(nbytes))
        try:
            yield file
        except BaseException:
            file.discard()
            raise
        try:
            file.close()
        except OSError:
            # A failed clean-up hides no error that says more.
            with suppress(OSError):
                file.discard()
            if system.exists(remote):
                raise _exists(url) from None
            raise
        try:
            verify(url)
        except BaseException:
            system.rm_file(remote)
            raise
    except OSError as error:
        raise CheckpointError(f"{url} cannot be written: {error}") from error


def _part_nbytes(nbytes: int) -> int:
    """Return how many bytes to upload at once, so that an object has no more parts than it may."""
    # Of Google Cloud Storage's uploads, too, parts are multiples of 256 KiB.
    return max(_LEAST_PART_NBYTES, round_up(ceil_div(nbytes, _MOST_PARTS), 2**20))


def _file_system(url: str, scheme: str) -> fsspec.AbstractFileSystem:
    """Return fsspec's file system for a scheme."""
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
    """Yield the path to write to; it gets the name `path` when the block ends without an error."""
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
