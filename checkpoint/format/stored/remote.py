"""Holds what storages that are reached by requests have in common.

They have no cache to pass by, no second name for an object, and nothing to flush: an acknowledged
upload is durable, and one that is cut off leaves no object.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence

from keepstep.checkpoint.errors import CheckpointExists
from keepstep.checkpoint.format.stored.object_names import PROBE_PREFIX


class RemoteStorage(ABC):
    """A `Storage` whose objects are read and written by requests."""

    __slots__ = ()

    url: str

    @abstractmethod
    def read(self, name: str, nbytes: int = 0) -> bytes:
        """See `Storage.read`."""

    @abstractmethod
    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See `Storage.write`."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """See `Storage.delete`."""

    @property
    def reads_past_cache(self) -> bool:
        """See `Storage.reads_past_cache`."""
        return False

    def read_past_cache(self, name: str, buffer: memoryview, offset: int) -> int | None:
        """See `Storage.read_past_cache`."""
        return None

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        """See `Storage.prefetch`: does nothing, because readers send parallel requests anyway."""
        return

    @property
    def can_link(self) -> bool:
        """See `Storage.can_link`."""
        return False

    def link(self, source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """See `Storage.link`."""
        return False

    def flush(self, names: Sequence[str]) -> None:
        """See `Storage.flush`."""
        return

    def unfinished(self) -> Sequence[str]:
        """See `Storage.unfinished`."""
        return ()

    def probe_writable(self) -> None:
        """See `Storage.probe_writable`."""
        name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
        self.write(name, [b"keepstep"])
        self.delete(name)

    def check_created(self, name: str, data: bytes) -> None:
        """Accept an object that exists with these bytes: a request may be answered twice.

        Raises:
            CheckpointExists: it has others.
        """
        if self.read(name, len(data)) != data:
            raise CheckpointExists(
                f"{self.url}: {name} exists already; committed steps are never overwritten"
            )


def scatter(data: memoryview, buffers: Sequence[memoryview]) -> int:
    """Copy bytes into buffers, one after the other; return how many there are."""
    start = 0
    for buffer in buffers:
        piece = data[start : start + buffer.nbytes]
        buffer[: piece.nbytes] = piece
        start += piece.nbytes
    return data.nbytes
