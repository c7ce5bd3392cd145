"""Decides which checkpoints a retention policy removes, and when their objects are deleted.

Pure.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.stored_json import encode

GRACE_S = 3600.0
_CLOSED_GRACES = 24


_KEEP_NEWEST = Retention()


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The checkpoints to keep.

    These are what `retention` says, the `best` by a metric, given as (how many, "min" or "max"),
    and the `pinned` steps.
    """

    retention: Retention = _KEEP_NEWEST
    best: tuple[int, str] | None = None
    pinned: frozenset[int] = frozenset()


def checkpoints_to_remove(
    steps: Sequence[StoredStep],
    policy: RetentionPolicy,
    metric: Mapping[StoredStep, float] | None = None,
) -> tuple[StoredStep, ...]:
    """Return the checkpoints that a policy does not keep, oldest first.

    Args:
        steps: the committed checkpoints.
        policy: which ones to keep.
        metric: the values that `best` compares; a checkpoint whose value is NaN has none.
    """
    newest_first = sorted(steps, key=lambda stored: (stored.step, stored.generation), reverse=True)
    # Of several generations of a step only the newest is kept.
    current = {stored.step: stored for stored in reversed(newest_first)}
    retention = policy.retention
    # Newest first, as `current` is not.
    distinct = list(dict.fromkeys(stored.step for stored in newest_first))
    kept = {*distinct[: max(1, retention.last)], *policy.pinned}
    if retention.every is not None:
        kept |= {step for step in current if step % retention.every == 0}
    if retention.behind and distinct:
        kept |= {*[s for s in distinct if s <= distinct[0] - retention.behind][:1]}
    if policy.best is not None and metric:
        count, direction = policy.best
        # NaN, the loss of a diverged run, would leave the others unsorted too.
        comparable = (s for s in current.values() if s in metric and not math.isnan(metric[s]))
        best_first = sorted(comparable, key=lambda s: metric[s], reverse=direction == "max")
        kept |= {stored.step for stored in best_first[:count]}
    return tuple(s for s in reversed(newest_first) if s.step not in kept or current[s.step] != s)


def older_to_remove(
    steps: Sequence[StoredStep], published: StoredStep, retention: Retention
) -> tuple[StoredStep, ...]:
    """Return the checkpoints that a job does not keep once it has published one, oldest first.

    That one is complete; a later one may be damaged, or of steps that were undone. So neither it
    nor a later one is removed, and later ones do not count as the newest.
    """
    until = (published.step, published.generation)
    older = [stored for stored in steps if (stored.step, stored.generation) <= until]
    return checkpoints_to_remove(older, RetentionPolicy(retention))


@dataclass(frozen=True, slots=True)
class Note:
    """Garbage collection's record of an attempt that no manifest names.

    `at_s` is when, in wall-clock seconds; `names_crc` stands for the objects that the attempt had
    then. A closed attempt is never committed.
    """

    at_s: float
    names_crc: int
    is_closed: bool

    def encode(self) -> bytes:
        """Return the note as JSON."""
        return encode({"at_s": self.at_s, "names": self.names_crc, "closed": self.is_closed})

    @classmethod
    def decode(cls, data: bytes) -> Note | None:
        """Parse what `encode` returned; None if the data has another form.

        A crash may have cut it short: the attempt is noted again.
        """
        try:
            content = json.loads(data)
            return cls(float(content["at_s"]), int(content["names"]), bool(content["closed"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


def names_crc(names: Iterable[str]) -> int:
    """Return a checksum of the names of an attempt's objects: it changes while one is written."""
    return int(crc32c.crc32c("\n".join(sorted(names)).encode()))


class Disposal(enum.Enum):
    """Garbage collection's treatment of an attempt that no manifest names."""

    KEEP = enum.auto()
    NOTE = enum.auto()
    CLOSE = enum.auto()
    EMPTY = enum.auto()  # Delete all but the note.
    DELETE = enum.auto()


def dispose(names: Sequence[str], note: Note | None, *, now: float, grace_s: float) -> Disposal:
    """Return what to do with an attempt that no manifest names.

    A writer may be at work on it, however slowly. So it is noted; it is closed once nothing was
    added to it for the grace time, after which it cannot be committed any more; and it is emptied
    a grace time later, when whoever had just committed it would have been seen. The note stays for
    `_CLOSED_GRACES` more: a writer that awakes must find that it was closed.

    Args:
        names: the attempt's objects, without the note.
        note: what was noted about it.
        now: wall-clock seconds.
        grace_s: how long readers and writers may take to finish; 0 deletes at once.
    """
    if grace_s <= 0:
        return Disposal.DELETE
    if note is None or note.names_crc != names_crc(names):
        return Disposal.NOTE
    if now - note.at_s < grace_s:
        return Disposal.KEEP
    if not note.is_closed:
        return Disposal.CLOSE
    if names:
        return Disposal.EMPTY
    return Disposal.DELETE if now - note.at_s >= _CLOSED_GRACES * grace_s else Disposal.KEEP
