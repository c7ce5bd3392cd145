"""Interface of a storage: the operations on objects under a URL that checkpoints need.

`checkpoint.format.stored.files` implements it with files, `checkpoint.format.stored.objects`
with TensorStore's key-value stores (S3, Google Cloud Storage, and memory for tests), and in S3
`checkpoint.format.stored.s3_listing` finds directories. `checkpoint.format.stored.fsspec_storage`
implements it with what fsspec opens, such as Azure. All pass one suite of tests.

Invariants: an object is visible only when it is complete; `create` never replaces an object.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.s3_settings import s3_settings
from keepstep.checkpoint.format.stored.urls import ParsedUrl, parse_url

_OBJECT_STORES = ("s3", "gs", "memory")
"""Schemes that TensorStore opens."""


class Storage(Protocol):
    """Objects by name under one URL. Made by `open_storage`; thread-safe; keeps nothing open."""

    @property
    def url(self) -> str:
        """The URL, for error messages."""
        ...

    def read(self, name: str, nbytes: int = 0) -> bytes:
        """Return an object's bytes.

        Args:
            name: the object.
            nbytes: its expected size, which sets the time limit.

        Raises:
            CheckpointMissing: there is no such object.
            CheckpointError: the object cannot be read.
        """
        ...

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        """Fill the buffers, in order, with an object's bytes from `offset`; return their number.

        If the object has fewer bytes than the buffers take, the buffers' content is undefined.

        Raises:
            CheckpointMissing: there is no such object.
            CheckpointError: the object cannot be read.
        """
        ...

    @property
    def reads_past_cache(self) -> bool:
        """Whether `read_past_cache` may read anything."""
        ...

    def read_past_cache(self, name: str, buffer: memoryview, offset: int) -> int | None:
        """Fill a buffer as `read_into` does, without the system's memory where that is possible.

        Args:
            name: the object.
            buffer: whole blocks of `BLOCK_NBYTES`, in memory aligned to them (`TransferMemory`).
            offset: a multiple of them.

        Returns:
            As `read_into`; None if this storage does not do so.
        """
        ...

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        """Start to read bytes that a caller is going to need soon; never fails."""
        ...

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write an object, the concatenation of the pieces; it is durable after `flush`."""
        ...

    @property
    def can_link(self) -> bool:
        """Whether `link` may give any object another name."""
        ...

    def link(self, source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """Give an object another name, instead of writing the same bytes again.

        It is durable after `flush`.

        Args:
            source: the object.
            name: its other name.
            pieces: the bytes that it must have, exactly.

        Returns:
            Whether it has the name now. If not, because it has other bytes, does not exist or
            cannot have another name, what is under the name is undefined until it is written.
        """
        ...

    def flush(self, names: Sequence[str]) -> None:
        """Make these objects, written before, durable against a loss of power."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write an object that must not exist yet, durably.

        Raises:
            CheckpointExists: the object exists, with other content. (An object with the same
                content is the result of this call, repeated after a lost reply.)
        """
        ...

    def exists(self, name: str) -> bool:
        """Return whether an object exists."""
        ...

    def size(self, name: str) -> int:
        """Return the number of bytes of an object.

        Raises:
            CheckpointMissing: there is no such object.
            CheckpointError: the storage cannot be asked.
        """
        ...

    def names(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the objects that begin with the prefix, sorted."""
        ...

    def unfinished(self) -> Sequence[str]:
        """Return the names of what writers that died have left of objects; `delete` deletes it."""
        ...

    def directories_with(self, leaf: str, after: str = "") -> Sequence[str]:
        """Return the top-level directories that have an object of this name.

        Args:
            leaf: the object.
            after: only directories whose names come after this one, in order of their bytes.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        ...

    def delete_directory(self, directory: str) -> None:
        """Delete all objects of a directory, and what is unfinished in it."""
        ...

    def probe_writable(self) -> None:
        """Write and delete a small object, so that a job fails at its start if it cannot write.

        Raises:
            CheckpointError: objects cannot be written here.
        """
        ...


def open_storage(url: str) -> Storage:
    """Open the storage at a URL.

    S3's endpoint, region and credentials come from where AWS tools find them: the environment, or
    the profile of AWS_PROFILE; those of Azure from the variables that adlfs reads.

    Args:
        url: a path, `file://`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
            `memory://name`, or, to read, any URL of a storage that fsspec opens.

    Raises:
        CheckpointError: the URL has another form, or cannot be opened.
    """
    # Each back end is imported only when it is needed: a local job never loads TensorStore.
    parsed = parse_url(url)
    if parsed.local_path is not None:
        from keepstep.checkpoint.format.stored.files import FileStorage

        return FileStorage(url, parsed.local_path)
    if parsed.scheme not in _OBJECT_STORES:
        from keepstep.checkpoint.format.stored.fsspec_storage import open_by_fsspec

        return open_by_fsspec(url, parsed)
    spec = _specification(url, parsed)
    from keepstep.checkpoint.format.stored.objects import open_objects

    return open_objects(url, spec)


def _specification(url: str, parsed: ParsedUrl) -> dict[str, Any]:
    """Return TensorStore's specification of the key-value store at a URL."""
    prefix = parsed.path.strip("/")
    path = f"{prefix}/" if prefix else ""
    match parsed.scheme:
        case "s3":
            spec: dict[str, Any] = {"driver": "s3", "bucket": parsed.bucket, "path": path}
            settings = s3_settings(os.environ)
            if settings.endpoint:
                spec["endpoint"] = settings.endpoint
            if settings.region:
                spec["aws_region"] = settings.region
            if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
                # Every provider would take these first; but the chain of providers looks for files
                # nevertheless, and prints five lines if there are none, each time it is opened.
                spec["aws_credentials"] = {"type": "environment"}
            elif profile := os.environ.get("AWS_PROFILE"):
                # The chain of providers does not read the variable.
                spec["aws_credentials"] = {"type": "default", "profile": profile}
        case "gs":
            spec = {"driver": "gcs", "bucket": parsed.bucket, "path": path}
        case _:
            return {"driver": "memory", "path": f"{parsed.bucket}/{path}"}
    if not parsed.bucket:
        raise CheckpointError(f"{url} names no bucket; write {parsed.scheme}://BUCKET/PREFIX")
    return spec
