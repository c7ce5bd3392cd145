"""Checkpoints in a file system.

A file is written under a temporary name in its directory and then renamed. Durability comes in two
steps, because a flush is expensive and one covers many files: bytes go to the device as files
are written, and `flush` flushes files and directories, several at a time, so that they share the
commits of the file system's journal.

Large files are written past the page cache (`O_DIRECT`). Unaligned data is copied for that, as the
page cache would do; but nothing is left for the kernel to write back later, and the file does not
displace the job's memory with pages that it will not read. Readers may ask for the same. Where the
file system does not support it, the page cache is used, and flushed at once after a write.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import shutil
import stat
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
)
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.format.stored.object_names import PROBE_PREFIX
from keepstep.checkpoint.format.stored.transfer_memory import (
    BLOCK_NBYTES,
    LARGE_PAGE_NBYTES,
    allocate,
)

_LARGE_NBYTES = 2**20
# Size of one write past the page cache: one piece of memory for the device, and it fits a
# processor's cache.
_STAGING_NBYTES = LARGE_PAGE_NBYTES
# The largest object of which the reader does not know the size: a manifest.
_MAX_UNKNOWN_NBYTES = 2**30
_COMPARED_NBYTES = 2**20
_PARALLEL_FLUSHES = 8
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_UNFINISHED = ".unfinished"
_IOV_MAX = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A `Storage` over the files below `root`."""

    url: str
    root: Path

    def read(self, name: str, nbytes: int = 0) -> bytes:
        """See `Storage.read`."""
        with self._translate_errors(f"read {name}"), _open_file(self.root / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max(nbytes, _MAX_UNKNOWN_NBYTES):
                raise CheckpointDamaged(
                    f"{self.url}: {name} has {size} bytes, far more than it can have; "
                    "load an older step"
                )
            return file.readall()

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        """See `Storage.read_into`."""
        remaining = deque(buffer for buffer in buffers if buffer.nbytes)
        total = 0
        with self._translate_errors(f"read {name}"), _open_file(self.root / name) as file:
            while remaining:
                count = os.preadv(
                    file.fileno(), list(itertools.islice(remaining, _IOV_MAX)), offset + total
                )
                if count == 0:
                    break
                total += count
                _advance(remaining, count)
        return total

    @property
    def reads_past_cache(self) -> bool:
        """See `Storage.reads_past_cache`."""
        return bool(_O_DIRECT)

    def read_past_cache(self, name: str, buffer: memoryview, offset: int) -> int | None:
        """See `Storage.read_past_cache`."""
        with self._translate_errors(f"read {name}"):
            total = _read_direct(self.root / name, buffer, offset)
        if total is None or total == buffer.nbytes:
            return total
        # At the file's end, or a part of a block was read: such a rest cannot be read directly.
        return total + self.read_into(name, [buffer[total:]], offset + total)

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        """See `Storage.prefetch`.

        Without it the kernel reads ahead in small steps, and the reader waits for each.
        """
        with (
            suppress(OSError, OverflowError, CheckpointDamaged),
            _open_file(self.root / name) as file,
        ):
            os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        path = self.root / name
        views = [memoryview(piece).cast("B") for piece in pieces]
        is_large = sum(view.nbytes for view in views) >= _LARGE_NBYTES
        with self._translate_errors(f"write {name}"), self._temporary_path(path) as unfinished:
            if not (is_large and _write_direct(unfinished, views)):
                _write_buffered(unfinished, views, flush=is_large)
            unfinished.replace(path)

    @property
    def can_link(self) -> bool:
        """See `Storage.can_link`. A named file never changes, so it may have many names."""
        return True

    def link(self, source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """See `Storage.link`."""
        with suppress(OSError, CheckpointDamaged), _open_file(self.root / source) as file:
            if _has_content(file, pieces):
                with self._temporary_path(self.root / name) as unfinished:
                    os.link(self.root / source, unfinished)
                    unfinished.replace(self.root / name)
                return True
        return False

    def flush(self, names: Sequence[str]) -> None:
        """See `Storage.flush`."""
        directories = {
            self.root / parent for name in names for parent in PurePosixPath(name).parents
        }
        paths = [*(self.root / name for name in names), *directories]
        # Flushes wait for the device, which handles several at a time.
        with (
            self._translate_errors("flush what was written"),
            ThreadPoolExecutor(_PARALLEL_FLUSHES) as pool,
        ):
            for _ in pool.map(_flush, paths):
                pass

    def create(self, name: str, data: bytes) -> None:
        """See `Storage.create`."""
        path = self.root / name
        with self._translate_errors(f"create {name}"), self._temporary_path(path) as unfinished:
            _write_buffered(unfinished, [memoryview(data)], flush=True)
            try:
                # Unlike a rename, a link fails if the name is taken.
                os.link(unfinished, path)
            except FileExistsError:
                if self.read(name) != data:
                    raise CheckpointExists(
                        f"{self.url}: {name} exists already; committed steps are never overwritten"
                    ) from None
        self.flush([name])
        with self._translate_errors("flush the directories above"):
            for directory in self.root.parents:
                _flush(directory)

    def exists(self, name: str) -> bool:
        """See `Storage.exists`."""
        with self._translate_errors(f"look for {name}"):
            return stat.S_ISREG(_mode(self.root / name))

    def size(self, name: str) -> int:
        """See `Storage.size`."""
        with self._translate_errors(f"look for {name}"), _open_file(self.root / name) as file:
            return os.fstat(file.fileno()).st_size

    def names(self, prefix: str = "") -> Sequence[str]:
        """See `Storage.names`."""
        files = self._files(prefix.rpartition("/")[0])
        return [n for n in files if n.startswith(prefix) and not n.endswith(_UNFINISHED)]

    def unfinished(self) -> Sequence[str]:
        """See `Storage.unfinished`."""
        return [name for name in self._files("") if name.endswith(_UNFINISHED)]

    def directories_with(self, leaf: str, after: str = "") -> Sequence[str]:
        """See `Storage.directories_with`."""
        with self._translate_errors("list"):
            # A file, such as a checkpoint of another tool, has no directories in it.
            if not stat.S_ISDIR(_mode(self.root)):
                return []
            return [
                path.name
                for path in self.root.iterdir()
                if path.name > after and stat.S_ISREG(_mode(path / leaf))
            ]

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        with self._translate_errors(f"delete {name}"):
            (self.root / name).unlink(missing_ok=True)

    def delete_directory(self, directory: str) -> None:
        """See `Storage.delete_directory`."""
        with self._translate_errors(f"delete {directory}"):
            if (self.root / directory).exists():
                shutil.rmtree(self.root / directory)
        for parent in PurePosixPath(directory).parents[:-1]:
            # The directory above goes with the last one in it.
            with suppress(OSError):
                (self.root / parent).rmdir()

    def probe_writable(self) -> None:
        """See `Storage.probe_writable`."""
        name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
        self.write(name, [b"keepstep"])
        self.delete(name)

    def _files(self, directory: str) -> list[str]:
        """Return the names of all files below a directory, sorted."""
        with self._translate_errors("list"):
            found = (self.root / directory).rglob("*")
            return sorted(
                p.relative_to(self.root).as_posix() for p in found if stat.S_ISREG(_mode(p))
            )

    @contextmanager
    def _temporary_path(self, path: Path) -> Iterator[Path]:
        """Make the directory, yield a temporary name in it, and remove a file of that name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{_UNFINISHED}")
        try:
            yield unfinished
        finally:
            unfinished.unlink(missing_ok=True)

    @contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointMissing(
                f"{self.url}: could not {operation}: there is no such object"
            ) from error
        except OSError as error:
            remedy = {
                errno.ENOSPC: "free space, or choose another place",
                errno.EDQUOT: "ask for more quota, or choose another place",
                errno.EACCES: "give this user the right to, or choose another place",
                errno.EROFS: "mount it writable, or choose another place",
            }.get(error.errno or 0, "check that the place exists and is a directory")
            raise CheckpointError(
                f"{self.url}: could not {operation}: {error.strerror}; {remedy}"
            ) from error


def _open_file(path: Path, flags: int = 0) -> io.FileIO:
    """Open a regular file to read.

    Raises:
        CheckpointDamaged: it is something else: a pipe would wait for a writer, a device never end.
    """
    # Opening a pipe waits for a writer too, unless O_NONBLOCK is set.
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointDamaged(f"{path} is not a regular file; load an older step")
    return file


def _has_content(file: io.FileIO, pieces: Sequence[bytes | memoryview]) -> bool:
    """Return whether a file has exactly these bytes."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    if os.fstat(file.fileno()).st_size != sum(view.nbytes for view in views):
        return False
    buffer = memoryview(bytearray(_COMPARED_NBYTES))
    for view in views:
        for start in range(0, view.nbytes, _COMPARED_NBYTES):
            wanted = view[start : start + _COMPARED_NBYTES]
            filled = 0
            while filled < wanted.nbytes:
                count = file.readinto(buffer[filled : wanted.nbytes])
                if not count:
                    return False
                filled += count
            # NumPy compares with vector instructions; memoryviews compare byte by byte.
            if not np.array_equal(
                np.frombuffer(buffer[:filled], np.uint8), np.frombuffer(wanted, np.uint8)
            ):
                return False
    return True


def _read_direct(path: Path, buffer: memoryview, offset: int) -> int | None:
    """Read whole blocks of a file past the page cache; return how many bytes came.

    Return None if the file system does not support it.
    """
    total = 0
    try:
        with _open_file(path, _O_DIRECT) as file:
            while total < buffer.nbytes and total % BLOCK_NBYTES == 0:
                count = os.preadv(file.fileno(), [buffer[total:]], offset + total)
                if count == 0:
                    break
                total += count
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    return total


def _write_direct(path: Path, pieces: Sequence[memoryview]) -> bool:
    """Write a file past the page cache.

    Return False, and leave no file, if the file system does not support it.
    """
    if not _O_DIRECT:
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _O_DIRECT, 0o666)
    except OSError as error:
        if error.errno == errno.EINVAL:
            # Some file systems refuse only after they have made the file.
            path.unlink(missing_ok=True)
            return False
        raise
    try:
        # One extent instead of one for each write: other threads' files grow at the same time.
        total = sum(piece.nbytes for piece in pieces)
        os.posix_fallocate(descriptor, 0, total)
        staged = np.empty(0, np.uint8)
        filled = nbytes = 0
        for piece in pieces:
            remaining = np.frombuffer(piece, np.uint8)
            if not filled and remaining.ctypes.data % BLOCK_NBYTES == 0:
                aligned = remaining.size // BLOCK_NBYTES * BLOCK_NBYTES
                _write_all(descriptor, remaining[:aligned].data)
                remaining, nbytes = remaining[aligned:], nbytes + aligned
            while remaining.size:
                if not staged.size:
                    staged = allocate(min(_STAGING_NBYTES, total - nbytes))
                count = min(remaining.size, staged.size - filled)
                np.copyto(staged[filled : filled + count], remaining[:count])
                remaining, filled, nbytes = remaining[count:], filled + count, nbytes + count
                if filled == staged.size:
                    _write_all(descriptor, staged.data)
                    filled = 0
        if filled:
            # Only whole blocks can be written; the file is cut to its size afterwards.
            _write_all(descriptor, staged[: round_up(filled, BLOCK_NBYTES)].data)
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            path.unlink()
            return False
        raise
    finally:
        os.close(descriptor)
    return True


def _write_all(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def _write_buffered(path: Path, pieces: Sequence[memoryview], *, flush: bool) -> None:
    remaining = deque(piece for piece in pieces if piece.nbytes)
    with path.open("wb", buffering=0) as file:
        while remaining:
            count = os.writev(file.fileno(), list(itertools.islice(remaining, _IOV_MAX)))
            _advance(remaining, count)
        if flush:
            os.fsync(file.fileno())


def _advance(remaining: deque[memoryview], count: int) -> None:
    """Drop the first `count` bytes."""
    while count:
        first = remaining.popleft()
        if count < first.nbytes:
            remaining.appendleft(first[count:])
        count -= min(count, first.nbytes)


def _mode(path: Path) -> int:
    """Return the mode of a file or directory; 0 if there is none.

    `Path.is_file` takes every error for that from Python 3.14 on: a checkpoint whose storage does
    not answer for a moment would count as missing.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _flush(path: Path) -> None:
    """Flush a file or a directory's entries.

    A directory that this user may not open was not made by keepstep and needs no flush. Of some
    file systems, such as an automounter's, directories cannot be flushed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
