"""The objects that a writer wrote last: what has not changed since need not be written again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from keepstep.checkpoint.format.stored.listings import DataObject
from keepstep.checkpoint.format.stored.object_names import StoredStep

Paths = Mapping[DataObject, str]
"""Where objects are, under a URL. Some may have been deleted since."""


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The objects that a writer wrote of a checkpoint, which may have failed since."""

    stored: StoredStep
    paths: Paths


class LastPart:
    """The part that a writer wrote last; it writes parts one after the other."""

    def __init__(self) -> None:
        self._url = ""
        self._written: WrittenPart | None = None

    def at(self, url: str) -> WrittenPart | None:
        """Return what was written last; None if that was under another URL, or nothing."""
        return self._written if url == self._url else None

    def note(self, url: str, written: WrittenPart) -> None:
        """Keep what was written just now."""
        self._url, self._written = url, written


class EqualObjects:
    """Finds stored objects that may equal one to be written. Thread-safe.

    Args:
        last: what the writer wrote last, if it is known.
        look: returns what a writer of this number wrote of the newest checkpoint, if that is not
            what this one wrote last.
    """

    def __init__(self, last: WrittenPart | None, look: Callable[[], Paths]) -> None:
        self._last: Paths = {} if last is None else last.paths
        self._look = look
        self._newest: Paths | None = None
        self._lock = threading.Lock()

    def find(self, item: DataObject) -> Iterator[str]:
        """Yield the paths of objects with the checksums of this one, which others may have too."""
        last = self._last.get(item)
        if last is not None:
            yield last
        with self._lock:
            if self._newest is None:
                self._newest = self._look()
        newest = self._newest.get(item)
        if newest is not None and newest != last:
            yield newest
