"""Which verdicts hold, which held, and the stacks that were taken for them: a pure fold over what diagnosis says at each
turn.

A verdict is known by its subject and syndrome. It is over once diagnosis has been silent about it for `QUIET_S`: a verdict
that flickers at its threshold is one trouble and shall be told once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.monitor.verdicts import Subject, Syndrome, Verdict

QUIET_S = 5.0
_KEPT = 200

HANGS = frozenset({Syndrome.COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_HANG, Syndrome.MISMATCH})
"""Syndromes whose suspects' stacks are worth having."""


@dataclass(frozen=True, slots=True)
class VerdictEntry:
    """One verdict through its life. Times are wall-clock seconds since the epoch.

    Args:
        number: from 1, in order of opening.
        verdict: as last told.
        since_s: when the trouble began.
        opened_at_s: when it was first told.
        told_at_s: when it was last told.
        closed_at_s: when it was over; None while it holds.
        stacks: by rank, what its threads were doing, or why that is not known.
    """

    number: int
    verdict: Verdict
    since_s: float
    opened_at_s: float
    told_at_s: float
    closed_at_s: float | None = None
    stacks: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON."""
        return {
            "number": self.number,
            "verdict": self.verdict.to_json(),
            "subject": str(self.verdict.subject),
            "since_s": self.since_s,
            "opened_at_s": self.opened_at_s,
            "told_at_s": self.told_at_s,
            "closed_at_s": self.closed_at_s,
            "stacks": dict(self.stacks),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> VerdictEntry:
        """Return what `to_json` told."""
        return cls(
            int(told["number"]),
            Verdict.from_json(told["verdict"]),
            float(told["since_s"]),
            float(told["opened_at_s"]),
            float(told["told_at_s"]),
            None if told["closed_at_s"] is None else float(told["closed_at_s"]),
            dict(told["stacks"]),
        )


@dataclass(frozen=True, slots=True)
class VerdictLog:
    """The newest entries, oldest first, and how many there were ever, by syndrome."""

    entries: tuple[VerdictEntry, ...] = ()
    opened: Mapping[Syndrome, int] = field(default_factory=dict)

    @property
    def holding(self) -> tuple[VerdictEntry, ...]:
        """The entries that are not over."""
        return tuple(entry for entry in self.entries if entry.closed_at_s is None)

    def with_stacks(self, number: int, rank: int, stacks: Any) -> VerdictLog:
        """Return the log with the stacks of a rank kept with an entry."""
        return replace(
            self,
            entries=tuple(
                replace(entry, stacks={**entry.stacks, str(rank): stacks})
                if entry.number == number
                else entry
                for entry in self.entries
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the log as JSON."""
        return {"entries": [entry.to_json() for entry in self.entries], "opened": dict(self.opened)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> VerdictLog:
        """Return what `to_json` told."""
        opened = {Syndrome(name): int(count) for name, count in told["opened"].items()}
        return cls(tuple(map(VerdictEntry.from_json, told["entries"])), opened)


@dataclass(frozen=True, slots=True)
class VerdictChanges:
    """What a turn changed: entries that opened and entries that are over."""

    opened: tuple[VerdictEntry, ...] = ()
    closed: tuple[VerdictEntry, ...] = ()


def advance(
    log: VerdictLog, verdicts: Sequence[Verdict], now_s: float, wall_s: float
) -> tuple[VerdictLog, VerdictChanges]:
    """Fold the verdicts of one turn into the log.

    Args:
        log: as it was.
        verdicts: all that hold now.
        now_s: the job's clock, to which the verdicts' `since_s` belong.
        wall_s: the wall clock at the same instant.
    """
    said: dict[tuple[Subject, Syndrome], Verdict] = {
        (told.subject, told.syndrome): told for told in verdicts
    }
    entries: list[VerdictEntry] = []
    closed: list[VerdictEntry] = []
    for entry in log.entries:
        if entry.closed_at_s is None:
            again = said.pop((entry.verdict.subject, entry.verdict.syndrome), None)
            if again is not None:
                entry = replace(entry, verdict=again, told_at_s=wall_s)
            elif wall_s - entry.told_at_s >= QUIET_S:
                entry = replace(entry, closed_at_s=entry.told_at_s)
                closed.append(entry)
        entries.append(entry)
    number = max((entry.number for entry in log.entries), default=0)
    opened = [
        VerdictEntry(number + place, told, wall_s - max(0.0, now_s - told.since_s), wall_s, wall_s)
        for place, told in enumerate(said.values(), 1)
    ]
    counts = dict(log.opened)
    for entry in opened:
        counts[entry.verdict.syndrome] = counts.get(entry.verdict.syndrome, 0) + 1
    return VerdictLog(_newest([*entries, *opened]), counts), VerdictChanges(
        tuple(opened), tuple(closed)
    )


def _newest(entries: list[VerdictEntry]) -> tuple[VerdictEntry, ...]:
    """Drop the oldest entries that are over, until not too many are left."""
    surplus = len(entries) - _KEPT
    kept = []
    for entry in entries:
        if surplus > 0 and entry.closed_at_s is not None:
            surplus -= 1
        else:
            kept.append(entry)
    return tuple(kept)
