"""Checkpoints in a file system.

Bytes go from the caller's memory to a file without a copy in between, and back. A file is written beside its
place and renamed into it. Durability comes in two steps, because a flush is dear and one covers much: large
files are flushed as they are written, the rest and all directories by `settle`.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from checkpoint.errors import CheckpointError, CheckpointExists, CheckpointMissing

_FLUSH_AT_ONCE_NBYTES = 2**20
_PARALLEL_FLUSHES = 8
_UNFINISHED = ".unfinished"
_IOV_MAX = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A `Storage` over the files below `root`."""

    url: str
    root: Path

    def read(self, name: str) -> bytes:
        """See `Storage.read`."""
        with self._explained(f"read {name}"):
            return (self.root / name).read_bytes()

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        """See `Storage.read_into`."""
        rest = deque(buffer for buffer in buffers if buffer.nbytes)
        total = 0
        with self._explained(f"read {name}"), (self.root / name).open("rb", buffering=0) as file:
            while rest:
                count = os.preadv(file.fileno(), list(itertools.islice(rest, _IOV_MAX)), offset + total)
                if count == 0:
                    break
                total += count
                _advance(rest, count)
        return total

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        path = self.root / name
        with self._explained(f"write {name}"), self._beside(path) as unfinished:
            self._fill(
                unfinished,
                pieces,
                flush=sum(memoryview(piece).nbytes for piece in pieces) >= _FLUSH_AT_ONCE_NBYTES,
            )
            unfinished.replace(path)

    def settle(self, names: Sequence[str]) -> None:
        """See `Storage.settle`."""
        directories = {self.root / parent for name in names for parent in PurePosixPath(name).parents}
        paths = [*(self.root / name for name in names), *directories]
        # Flushes wait for the device, which takes several at a time.
        with self._explained("flush what was written"), ThreadPoolExecutor(_PARALLEL_FLUSHES) as pool:
            for _ in pool.map(_flush, paths):
                pass

    def create(self, name: str, data: bytes) -> None:
        """See `Storage.create`."""
        path = self.root / name
        with self._explained(f"create {name}"), self._beside(path) as unfinished:
            self._fill(unfinished, [data], flush=True)
            try:
                # Unlike a rename, a link fails if the name is taken.
                os.link(unfinished, path)
            except FileExistsError:
                if path.read_bytes() != data:
                    raise CheckpointExists(
                        f"{self.url}: {name} exists already; committed steps are never overwritten"
                    ) from None
        self.settle([name])
        with self._explained("flush the directories above"):
            for directory in self.root.parents:
                _flush(directory)

    def exists(self, name: str) -> bool:
        """See `Storage.exists`."""
        with self._explained(f"look for {name}"):
            return (self.root / name).exists()

    def names(self, prefix: str = "") -> Sequence[str]:
        """See `Storage.names`."""
        with self._explained("list"):
            top = self.root / prefix.rpartition("/")[0]
            found = [path.relative_to(self.root).as_posix() for path in top.rglob("*") if path.is_file()]
        return sorted(name for name in found if name.startswith(prefix) and not name.endswith(_UNFINISHED))

    def directories_with(self, leaf: str) -> Sequence[str]:
        """See `Storage.directories_with`."""
        with self._explained("list"):
            if not self.root.exists():
                return []
            return [path.name for path in self.root.iterdir() if (path / leaf).is_file()]

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        with self._explained(f"delete {name}"):
            (self.root / name).unlink(missing_ok=True)

    def delete_directory(self, directory: str) -> None:
        """See `Storage.delete_directory`."""
        with self._explained(f"delete {directory}"):
            if (self.root / directory).exists():
                shutil.rmtree(self.root / directory)

    def probe_writable(self) -> None:
        """See `Storage.probe_writable`."""
        name = f"probe-{uuid.uuid4().hex}"
        self.write(name, [b"keepstep"])
        self.delete(name)

    @contextmanager
    def _beside(self, path: Path) -> Iterator[Path]:
        """Make the directory, name an unfinished file in it, and see to it that none remains."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{_UNFINISHED}")
        try:
            yield unfinished
        finally:
            unfinished.unlink(missing_ok=True)

    def _fill(self, path: Path, pieces: Sequence[bytes | memoryview], *, flush: bool) -> None:
        rest = deque(view for piece in pieces if (view := memoryview(piece).cast("B")).nbytes)
        with path.open("wb", buffering=0) as file:
            while rest:
                _advance(rest, os.writev(file.fileno(), list(itertools.islice(rest, _IOV_MAX))))
            if flush:
                os.fsync(file.fileno())

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointMissing(f"{self.url}: could not {what}: there is no such object") from error
        except OSError as error:
            remedy = {
                errno.ENOSPC: "free space, or choose another place",
                errno.EDQUOT: "ask for more quota, or choose another place",
                errno.EACCES: "give this user the right to, or choose another place",
                errno.EROFS: "mount it writable, or choose another place",
            }.get(error.errno or 0, "check that the place exists and is a directory")
            raise CheckpointError(f"{self.url}: could not {what}: {error.strerror}; {remedy}") from error


def _advance(rest: deque[memoryview], count: int) -> None:
    """Drop the first `count` bytes."""
    while count:
        first = rest.popleft()
        if count < first.nbytes:
            rest.appendleft(first[count:])
        count -= min(count, first.nbytes)


def _flush(path: Path) -> None:
    """Flush a file or a directory's entries; a directory that may not be opened was not made by us."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
