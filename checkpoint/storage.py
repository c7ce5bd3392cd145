"""Objects under a URL: the little that checkpoints ask of a file system or an object store.

TensorStore's key-value stores do the work. A write is visible only whole (a temporary file and a rename, or one PUT) and durable when it returns; a
conditional write never replaces what is there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import tensorstore

from checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointExists, CheckpointMissing

_MEMORY_CONTEXT: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Storage:
    """Objects by name under one URL. Made by `open_storage`; safe to use from several threads."""

    url: str
    store: Any

    def read(self, name: str) -> bytes:
        """Return an object's bytes.

        Raises:
            CheckpointMissing: there is no such object.
        """
        result = self._do(f"read {name}", lambda: self.store.read(name).result())
        if result.state != "value":
            raise CheckpointMissing(f"{self.url}: there is no object {name}")
        return bytes(result.value)

    def write(self, name: str, data: bytes) -> None:
        """Write an object, durably."""
        self._do(f"write {name}", lambda: self.store.write(name, data).result())

    def create(self, name: str, data: bytes) -> None:
        """Write an object that must not exist yet.

        Raises:
            CheckpointExists: it does.
        """
        result = self._do(f"create {name}", lambda: self.store.write(name, data, if_equal=b"").result())
        # On a refused condition TensorStore returns an unknown generation instead of raising.
        if not result.generation or self.read(name) != data:
            raise CheckpointExists(f"{self.url}: {name} exists already; committed steps are never overwritten")

    def names(self, prefix: str = "") -> Sequence[str]:
        """Return the names that begin with the prefix, sorted."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        listed = self._do("list", lambda: self.store.list(tensorstore.KvStore.KeyRange(prefix, end)).result())
        return sorted(name.decode() for name in listed)

    def delete(self, prefix: str) -> None:
        """Delete everything whose name begins with the prefix."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        self._do(
            "delete", lambda: self.store.delete_range(tensorstore.KvStore.KeyRange(prefix, end)).result()
        )

    def probe_writable(self) -> None:
        """Find out now, rather than after hours, whether objects can be written here.

        Raises:
            CheckpointError: they cannot.
        """
        name = f"probe-{uuid.uuid4().hex}"
        self.write(name, b"keepstep")
        self._do("delete the probe", lambda: self.store.delete_range(
            tensorstore.KvStore.KeyRange(name, name + "~")
        ).result())  # fmt: skip

    def _do(self, what: str, act: Any) -> Any:
        try:
            return act()
        except (ValueError, OSError) as error:
            reason = str(error).splitlines()[0].partition(" [")[0]
            raise CheckpointError(
                f"{self.url}: could not {what}: {reason}; check that the place exists and that you may write there"
            ) from error


def open_storage(url: str) -> Storage:
    """Return the storage at a URL: a path, `file://`, `s3://bucket/prefix`, `gs://bucket/prefix` or (for tests) `memory://`.

    S3's endpoint and region come from AWS_ENDPOINT_URL and AWS_REGION, credentials from wherever AWS tools find them.

    Raises:
        CheckpointError: the URL is none of these, or cannot be opened.
    """
    parsed = urlparse(url)
    match parsed.scheme:
        case "" | "file":
            path = Path(parsed.path if parsed.scheme else url).absolute()
            spec: dict[str, Any] = {"driver": "file", "path": f"{path}/"}
        case "s3":
            spec = {"driver": "s3", "bucket": parsed.netloc, "path": f"{parsed.path.strip('/')}/"}
            if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
                spec["endpoint"] = endpoint
            if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
                spec["aws_region"] = region
        case "gs":
            spec = {"driver": "gcs", "bucket": parsed.netloc, "path": f"{parsed.path.strip('/')}/"}
        case "memory":
            spec = {"driver": "memory", "path": f"{parsed.netloc}{parsed.path}/"}
        case other:
            raise CheckpointError(f"{url}: {other}:// is not supported; use a path, file://, s3:// or gs://")
    context = None
    if parsed.scheme == "memory":
        # One process's memory: every storage of that URL sees the same objects.
        context = _MEMORY_CONTEXT.setdefault("context", tensorstore.Context())
    try:
        return Storage(url, tensorstore.KvStore.open(spec, context=context).result())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{url}: cannot be opened: {str(error).splitlines()[0]}") from error


def verify(data: bytes, nbytes: int, crc: int, actual_crc: int, where: str) -> None:
    """Compare an object with its entry in the manifest.

    Raises:
        CheckpointDamaged: size or checksum differ.
    """
    if len(data) != nbytes:
        raise CheckpointDamaged(f"{where} has {len(data)} bytes, the manifest says {nbytes}; load an older step")
    if crc != actual_crc:
        raise CheckpointDamaged(f"{where} does not match its checksum: stored bytes were changed; load an older step")


