"""The objects that a writer wrote last: what has not changed since need not be written again."""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.checkpoint.stored.listings import DataObject


class LastPart:
    """What a writer wrote last; it writes parts one after the other."""

    def __init__(self) -> None:
        self._url = ""
        self._paths: Mapping[DataObject, str] | None = None

    def paths(self, url: str) -> Mapping[DataObject, str] | None:
        """Return the paths of these objects under a URL; None if the writer wrote elsewhere.

        Some may have been deleted since.
        """
        return self._paths if url == self._url else None

    def note(self, url: str, paths: Mapping[DataObject, str]) -> None:
        """Keep the paths of the objects that were written just now."""
        self._url, self._paths = url, paths
