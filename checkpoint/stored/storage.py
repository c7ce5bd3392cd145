"""Objects under a URL: the little that checkpoints ask of a file system or an object store.

`keepstep.checkpoint.stored.files` does it with files, `keepstep.checkpoint.stored.objects` with TensorStore's key-value stores (S3, Google
Cloud Storage, and memory for tests). Both pass one suite of tests. An object is visible only whole, and
`create` never replaces one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

from keepstep.checkpoint.errors import CheckpointError


class Storage(Protocol):
    """Objects by name under one URL. Made by `open_storage`; thread-safe; keeps nothing open."""

    @property
    def url(self) -> str:
        """The URL, for messages."""
        ...

    def read(self, name: str, nbytes: int = 0) -> bytes:
        """Return an object's bytes.

        Args:
            name: which one.
            nbytes: how many there are, as far as the caller knows: many are given more time.

        Raises:
            CheckpointMissing: there is no such object.
            CheckpointError: it cannot be read.
        """
        ...

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        """Fill the buffers, in order, with an object's bytes from an offset on; return how many there were.

        If these are fewer than the buffers take, what the buffers hold is undefined.

        Raises:
            CheckpointMissing: there is no such object.
            CheckpointError: it cannot be read.
        """
        ...

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        """Hear what is going to be read soon; never fails."""
        ...

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write an object, the pieces one after the other; it is durable after `flush`."""
        ...

    @property
    def supports_links(self) -> bool:
        """Whether `link_identical` can ever succeed."""
        ...

    def link_identical(self, source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """Make `name` another name of an object that has exactly these bytes, instead of writing them again.

        Return False if it has others, is not there (any more), or cannot be given another name. Durable after `flush`.
        """
        ...

    def flush(self, names: Sequence[str]) -> None:
        """Return once these objects, written before, would survive a loss of power."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write an object that must not exist yet, durably.

        Raises:
            CheckpointExists: it does, with other content. (With the same it was this call, and a reply was
                lost.)
        """
        ...

    def exists(self, name: str) -> bool:
        """Return whether an object is there."""
        ...

    def names(self, prefix: str = "") -> Sequence[str]:
        """Return the names that begin with the prefix, sorted."""
        ...

    def directories_with(self, leaf: str) -> Sequence[str]:
        """Return the top directories that have an object of this name."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        ...

    def delete_directory(self, directory: str) -> None:
        """Delete all objects of a top directory."""
        ...

    def probe_writable(self) -> None:
        """Find out now, rather than after hours, whether objects can be written here.

        Raises:
            CheckpointError: they cannot.
        """
        ...


def open_storage(url: str) -> Storage:
    """Return the storage at a URL: a path, `file://`, `s3://bucket/prefix`, `gs://bucket/prefix`, or `memory://name`.

    S3's endpoint and region come from AWS_ENDPOINT_URL and AWS_REGION, credentials from wherever AWS tools
    find them.

    Raises:
        CheckpointError: the URL is none of these, or cannot be opened.
    """
    # Each back end is imported where it is asked for: a local job never loads TensorStore.
    parsed = urlparse(url)
    if parsed.scheme in ("", "file"):
        from keepstep.checkpoint.stored.files import FileStorage

        if parsed.netloc not in ("", "localhost"):
            raise CheckpointError(
                f"{url}: names a host; write file:///{parsed.netloc}{parsed.path} for a local path"
            )
        return FileStorage(url, Path(unquote(parsed.path) if parsed.scheme else url).absolute())
    spec = _specification(url)
    from keepstep.checkpoint.stored.objects import open_objects

    return open_objects(url, spec)


def _specification(url: str) -> dict[str, Any]:
    """Return TensorStore's specification of the key-value store at a URL."""
    parsed = urlparse(url)
    prefix = parsed.path.strip("/")
    path = f"{prefix}/" if prefix else ""
    match parsed.scheme:
        case "s3":
            spec: dict[str, Any] = {"driver": "s3", "bucket": parsed.netloc, "path": path}
            if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
                "AWS_ENDPOINT_URL"
            ):
                spec["endpoint"] = endpoint
            if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
                spec["aws_region"] = region
        case "gs":
            spec = {"driver": "gcs", "bucket": parsed.netloc, "path": path}
        case "memory":
            return {"driver": "memory", "path": f"{parsed.netloc}/{path}"}
        case other:
            raise CheckpointError(
                f"{url}: {other}:// is not supported; use a path, file://, s3:// or gs://"
            )
    if not parsed.netloc:
        raise CheckpointError(f"{url}: names no bucket; write {parsed.scheme}://BUCKET/PREFIX")
    return spec
