"""Digests on their way up the tree: kept until the daemon above has fetched them, and brought together round by round.

Diagnosis wants each digest once and in order. So a daemon numbers them in one row with its readings, and whoever asks says
which number it had last. In a round one digest of each daemon below, its next, is merged with the daemon's own; ranks are in
one of them only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from keepstep.monitor.diagnosis.tables import EMPTY, Digest, merge
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.records import Communicator

_KEPT = 128
_TABLES = tuple(field.name for field in fields(Digest))
_DTYPES = {name: getattr(EMPTY, name).dtype for name in _TABLES}


class Outbox:
    """A daemon's newest digests, with their numbers. What nobody fetches for a minute is dropped."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Digest]] = deque(maxlen=_KEPT)

    def add(self, number: int, digest: Digest) -> None:
        """Keep a digest."""
        self._kept.append((number, digest))

    def clear(self) -> None:
        """Drop all of them."""
        self._kept.clear()

    def since(self, number: int) -> tuple[Digest, ...]:
        """Return the digests after that number, oldest first."""
        return tuple(digest for at, digest in self._kept if at > number)


class Inbox:
    """Digests of daemons below that were not yet brought together."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Digest]] = {}

    def add(self, source: str, digests: Iterable[Digest]) -> None:
        """Take in what a daemon told."""
        self._waiting.setdefault(source, deque(maxlen=_KEPT)).extend(digests)

    def drop(self, source: str) -> None:
        """Forget what a daemon told that is below no more, or began anew."""
        self._waiting.pop(source, None)

    def clear(self) -> None:
        """Forget what all daemons told."""
        self._waiting.clear()

    def rounds(self, own: Digest | None, communicators: Mapping[int, Communicator]) -> list[Digest]:
        """Return everything that waits, a digest a round, the daemon's own in the first."""
        merged = []
        while own is not None or any(self._waiting.values()):
            parts = [waiting.popleft() for waiting in self._waiting.values() if waiting]
            if own is not None:
                parts.append(own)
                own = None
            merged.append(merge(parts, communicators))
        return merged


def without(digest: Digest, ranks: Collection[int]) -> Digest:
    """Return the digest without what it tells of some ranks in particular."""
    if not ranks:
        return digest
    kept: dict[str, np.ndarray] = {}
    for name in _TABLES:
        rows = getattr(digest, name)
        if "rank" in (rows.dtype.names or ()):
            kept[name] = rows[~np.isin(rows["rank"], list(ranks))]
    return replace(digest, **kept)


def counts(digest: Digest) -> list[int]:
    """Return how many rows each table has, in order."""
    return [len(getattr(digest, name)) for name in _TABLES]


def as_bytes(digest: Digest) -> bytes:
    """Return the tables' rows, one after the other."""
    return b"".join(getattr(digest, name).tobytes() for name in _TABLES)


def from_bytes(data: bytes, offset: int, rows: Sequence[int]) -> tuple[Digest, int]:
    """Return the digest that begins at `offset` and has so many rows, and where it ends.

    Raises:
        ProtocolViolation: there are fewer bytes than that.
    """
    tables: dict[str, np.ndarray] = {}
    for name, count in zip(_TABLES, rows, strict=True):
        nbytes = count * _DTYPES[name].itemsize if isinstance(count, int) else -1
        if nbytes < 0 or offset + nbytes > len(data):
            raise ProtocolViolation("the summary promises more of a digest than it carries")
        tables[name] = np.frombuffer(data, _DTYPES[name], count, offset)
        offset += nbytes
    return Digest(**tables), offset
