"""Checkpoints in the storages that fsspec opens: Azure, and others to read from.

A file system is written to only if its `pipe_file(mode="create")` is known to be one conditional
request: that of most others asks first and writes then, so that two writers could commit one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec

from keepstep.checkpoint.errors import CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.stored.remote import RemoteStorage, scatter
from keepstep.checkpoint.format.stored.urls import ParsedUrl

T = TypeVar("T")

_CREATES = ("abfs", "abfss", "az")
"""Schemes of file systems that create conditionally, and whose objects appear complete."""
_NO_LISTING = ("data", "http", "https")
"""Schemes that nothing can be found in by its name's beginning."""
_AZURE = (
    "container, account (AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING) and "
    "credentials"
)
_PARALLEL_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class FsspecStorage(RemoteStorage):
    """A `Storage` over a file system of fsspec.

    Attributes:
        url: the URL.
        system: the file system.
        root: the path that the URL names in it.
        creates: whether it creates conditionally, so that checkpoints may be written.
    """

    url: str
    system: Any
    root: str
    creates: bool

    def read(self, name: str, nbytes: int = 0) -> bytes:
        """See `Storage.read`."""
        with self._translated(f"read {name}", name):
            return bytes(self.system.cat_file(self._path(name)))

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        """See `Storage.read_into`."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        with self._translated(f"read {name}", name):
            try:
                data = memoryview(self.system.cat_file(self._path(name), start=offset, end=end))
            except FileNotFoundError:
                raise
            except Exception:
                # Object stores refuse a range that begins at the end.
                if self.size(name) > offset:
                    raise
                return 0
        return scatter(data, buffers)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        self._check_creates()
        with self._translated(f"write {name}", name):
            self.system.pipe_file(self._path(name), b"".join(pieces))

    def create(self, name: str, data: bytes) -> None:
        """See `Storage.create`."""
        self._check_creates()
        with self._translated(f"create {name}", name):
            try:
                self.system.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                pass
            else:
                return
        self.check_created(name, data)

    def exists(self, name: str) -> bool:
        """See `Storage.exists`."""
        try:
            self.size(name)
        except CheckpointMissing:
            return False
        return True

    def size(self, name: str) -> int:
        """See `Storage.size`."""
        # Not `exists` of fsspec, which takes any error for an absent object.
        with self._translated(f"read {name}", name):
            found = self._listed(lambda: self.system.info(self._path(name)))
        if found is None or found["type"] != "file":
            raise CheckpointMissing(f"{self.url}: there is no object {name}")
        return int(found["size"])

    def names(self, prefix: str = "") -> Sequence[str]:
        """See `Storage.names`."""
        directory = prefix.rpartition("/")[0]
        with self._translated("list", prefix):
            found = self._listed(lambda: self.system.find(self._path(directory)))
            if not found:
                self._check_container()
                return []
        names = (path.removeprefix(self.root).strip("/") for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def directories_with(self, leaf: str, after: str = "") -> Sequence[str]:
        """See `Storage.directories_with`."""
        with self._translated("list", ""):
            entries = self._listed(lambda: self.system.ls(self.root, detail=True))
            if not entries:
                self._check_container()
                return []
        found = {
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in entries
            if entry["type"] == "directory"
        }
        directories = sorted(name for name in found if name > after)
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            has_leaf = pool.map(lambda directory: self.exists(f"{directory}/{leaf}"), directories)
            return [name for name, has in zip(directories, has_leaf, strict=True) if has]

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        with self._translated(f"delete {name}", name):
            self._listed(lambda: self.system.rm_file(self._path(name)))

    def delete_directory(self, directory: str) -> None:
        """See `Storage.delete_directory`."""
        with self._translated(f"delete {directory}", directory):
            self._listed(lambda: self.system.rm(self._path(directory), recursive=True))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _listed(self, ask: Callable[[], T]) -> T | None:
        """Return what a request finds in the storage as it is now; None if it finds nothing."""
        self.system.invalidate_cache()
        try:
            return ask()
        except FileNotFoundError:
            return None

    def _check_container(self) -> None:
        """Raise CheckpointError if there is no container: where nothing is found, none may be."""
        container = self.root.partition("/")[0]
        if self.creates and self._listed(lambda: self.system.info(container)) is None:
            raise CheckpointError(f"{self.url}: there is no container {container}; check {_AZURE}")

    def _check_creates(self) -> None:
        if not self.creates:
            scheme = self.url.partition("://")[0]
            raise CheckpointError(
                f"{self.url}: {scheme}:// is read only here: it has no request that keepstep knows "
                "to create an object only if it is absent, so that two writers could commit one "
                "step; write to a path, s3://, gs:// or az://, and copy the files"
            )

    @contextmanager
    def _translated(self, operation: str, name: str) -> Iterator[None]:
        """Raise the errors of any file system as ours."""
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CheckpointMissing(f"{self.url}: there is no object {name}") from error
        except Exception as error:
            settings = _settings(self.creates)
            raise CheckpointError(
                f"{self.url}: could not {operation}: {_reason(error)}; check {settings}"
            ) from error


def open_by_fsspec(url: str, parsed: ParsedUrl) -> FsspecStorage:
    """Open a URL of a scheme that fsspec knows.

    Args:
        url: the URL.
        parsed: its parts.

    Raises:
        CheckpointError: it knows no such scheme, its package is not installed, or the file system
            cannot be opened.
    """
    scheme = parsed.scheme
    if scheme not in fsspec.available_protocols() or scheme in _NO_LISTING:
        raise CheckpointError(
            f"{url}: {scheme}:// is not supported; use a path, file://, s3://, gs://, az://, or a "
            "scheme of fsspec that can list"
        )
    creates = scheme in _CREATES
    if creates and not parsed.bucket:
        raise CheckpointError(f"{url} names no container; write {scheme}://CONTAINER/PREFIX")
    try:
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise CheckpointError(f"{url} cannot be opened: {error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{url} cannot be opened: {_reason(error)}; check {_settings(creates)}"
        ) from error
    return FsspecStorage(url, system, root.rstrip("/"), creates)


def _settings(creates: bool) -> str:
    return _AZURE if creates else "the URL and credentials"


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
