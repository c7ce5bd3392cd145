"""The objects that a writer wrote last: what has not changed since need not be written again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from keepstep.checkpoint.stored.listings import DataObject

Paths = Mapping[DataObject, str]
"""Where objects are, under a URL. Some may have been deleted since."""


class LastPart:
    """What a writer wrote last; it writes parts one after the other."""

    def __init__(self) -> None:
        self._url = ""
        self._paths: Paths | None = None

    def paths(self, url: str) -> Paths | None:
        """Return the paths of these objects; None if the writer wrote last under another URL."""
        return self._paths if url == self._url else None

    def note(self, url: str, paths: Paths) -> None:
        """Keep the paths of the objects that were written just now."""
        self._url, self._paths = url, paths


class EqualObjects:
    """Finds stored objects that may equal one to be written. Thread-safe.

    Args:
        last: what the writer wrote last, if it is known.
        look: returns what it wrote of the newest checkpoint. It is called where `last` is not
            known, or where what it has is there no more.
    """

    def __init__(self, last: Paths | None, look: Callable[[], Paths]) -> None:
        self._last = last
        self._look = look
        self._newest: Paths | None = None
        self._lock = threading.Lock()

    def find(self, item: DataObject) -> Iterator[str]:
        """Yield the paths of objects with the checksums of this one, which others may have too."""
        if self._last is not None:
            if item not in self._last:
                return
            yield self._last[item]
        with self._lock:
            if self._newest is None:
                self._newest = self._look()
        if item in self._newest:
            yield self._newest[item]
