"""Relays digests up the tree: keeps them until the parent has fetched them, and merges them.

Diagnosis needs each digest once and in order. So a daemon numbers digests in one sequence with its
readings, and a parent requests those after the last number it has. In a round, the next digest of
each child is merged with the daemon's own; each rank is in only one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from keepstep.monitor.diagnosis.tables import EMPTY, Digest, merge
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.records import Communicator, Ending, Measure, Phase

_KEPT = 128
_TABLES = tuple(field.name for field in fields(Digest))
_ALLOWED = {
    "ending": [ending.value for ending in Ending],
    "phase": [-1, *(phase.value for phase in Phase)],
    "code": [measure.value for measure in Measure],
}
_MEASURED = "value"
"""A number that a worker reported, such as a loss: it may be no number."""
_DTYPES = {name: getattr(EMPTY, name).dtype for name in _TABLES}


class Outbox:
    """A daemon's newest digests, with their numbers. Digests older than a minute are dropped."""

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
    """Digests of child daemons that were not yet merged."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Digest]] = {}

    def add(self, source: str, digests: Iterable[Digest]) -> None:
        """Append digests of a daemon."""
        self._waiting.setdefault(source, deque(maxlen=_KEPT)).extend(digests)

    def drop(self, source: str) -> None:
        """Drop the digests of a daemon that is no longer a child, or has restarted."""
        self._waiting.pop(source, None)

    def clear(self) -> None:
        """Drop the digests of all daemons."""
        self._waiting.clear()

    def rounds(self, own: Digest | None, communicators: Mapping[int, Communicator]) -> list[Digest]:
        """Return all waiting digests, one merged digest a round; the first includes `own`."""
        merged = []
        while own is not None or any(self._waiting.values()):
            parts = [waiting.popleft() for waiting in self._waiting.values() if waiting]
            if own is not None:
                parts.append(own)
                own = None
            merged.append(merge(parts, communicators))
        return merged


def without(digest: Digest, ranks: Collection[int]) -> Digest:
    """Return the digest without the rows of some ranks."""
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
    """Return the tables' rows as bytes, one after the other."""
    return b"".join(getattr(digest, name).tobytes() for name in _TABLES)


def from_bytes(data: bytes, offset: int, rows: Sequence[int]) -> tuple[Digest, int]:
    """Return the digest that begins at `offset`, and the offset at which it ends.

    Args:
        data: bytes of a summary.
        offset: in bytes.
        rows: number of rows of each table, in order.

    Raises:
        ProtocolViolation: there are fewer bytes than the rows need, or rows that no monitor makes.
    """
    tables: dict[str, np.ndarray] = {}
    if len(rows) != len(_TABLES):
        raise ProtocolViolation(f"a digest has {len(_TABLES)} tables, not {len(rows)}")
    for name, count in zip(_TABLES, rows, strict=True):
        nbytes = count * _DTYPES[name].itemsize if isinstance(count, int) else -1
        if nbytes < 0 or offset + nbytes > len(data):
            raise ProtocolViolation("the summary announces more digest rows than it contains")
        tables[name] = np.frombuffer(data, _DTYPES[name], count, offset)
        _check(name, tables[name])
        offset += nbytes
    return Digest(**tables), offset


def _check(name: str, rows: np.ndarray) -> None:
    """Raise ProtocolViolation if a rank, a code or a time cannot be one."""
    for field in rows.dtype.names or ():
        column = rows[field]
        if field in _ALLOWED:
            is_valid = np.isin(column, _ALLOWED[field])
        elif field == "rank":
            is_valid = column >= 0
        elif column.dtype.kind == "f" and field != _MEASURED:
            is_valid = ~np.isnan(column)
        else:
            continue
        if not is_valid.all():
            raise ProtocolViolation(f"the summary has rows of {name} whose {field} is not valid")
