"""A storage that records what is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.storage import Storage


class RecordingStorage:
    """A storage that records the objects that are read, by the last part of their names.

    Attributes:
        reads: the objects that were read as a whole.
        ranges: the objects of which a range was read, and its size.
        listed: the directories that were listed.
        unreadable: the object of which no range can be read; None if all can.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.reads: list[str] = []
        self.ranges: list[tuple[str, int]] = []
        self.listed: list[str] = []
        self.unreadable: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read(self, name: str, nbytes: int = 0) -> bytes:
        self.reads.append(name.rpartition("/")[2])
        return self.storage.read(name, nbytes)

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        short = name.rpartition("/")[2]
        if short == self.unreadable:
            raise CheckpointError("the storage is away")
        self.ranges.append((short, sum(buffer.nbytes for buffer in buffers)))
        return self.storage.read_into(name, buffers, offset)

    def directories_with(self, leaf: str, after: str = "") -> Sequence[str]:
        found = self.storage.directories_with(leaf, after)
        self.listed += found
        return found
