"""Logs the verdicts that hold and that held, with the stacks taken for them. Pure.

A verdict is identified by its subject and syndrome. It ends when diagnosis has not returned it for
`QUIET_S`: a verdict that flickers at its threshold is one problem and is reported once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keepstep.monitor.verdicts import Subject, Syndrome, Verdict
from keepstep.monitor.watch.verdict_notes import NoteKind, NoteRequest, VerdictNote, noted

QUIET_S = 5.0
_KEPT = 200

HANGS = frozenset({Syndrome.COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_HANG, Syndrome.MISMATCH})
"""Syndromes for which the stacks of the suspects are dumped."""


@dataclass(frozen=True, slots=True)
class VerdictEntry:
    """One verdict from opening to end. Times are wall-clock seconds since the epoch, except one.

    Args:
        number: from 1, in order of opening.
        verdict: as diagnosis returned it last.
        since_s: when the problem began.
        opened_at_s: when diagnosis returned it first.
        reported_at_s: when diagnosis returned it last.
        closed_at_s: when it ended; None while it holds.
        stacks: by rank, those of its threads, or why they are not known.
        reported_now_s: `reported_at_s` by the monotonic clock, since the wall clock may be set;
            None for an entry of an earlier daemon until its first round here.
    """

    number: int
    verdict: Verdict
    since_s: float
    opened_at_s: float
    reported_at_s: float
    closed_at_s: float | None = None
    stacks: Mapping[str, Any] = field(default_factory=dict)
    reported_now_s: float | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON."""
        return {
            "number": self.number,
            "verdict": self.verdict.to_json(),
            "subject": str(self.verdict.subject),
            "to_do": self.verdict.instruction,
            "since_s": self.since_s,
            "opened_at_s": self.opened_at_s,
            "reported_at_s": self.reported_at_s,
            "closed_at_s": self.closed_at_s,
            "stacks": dict(self.stacks),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> VerdictEntry:
        """Return the entry that `to_json` encoded."""
        closed_at_s = fields["closed_at_s"]
        return cls(
            number=int(fields["number"]),
            verdict=Verdict.from_json(fields["verdict"]),
            since_s=float(fields["since_s"]),
            opened_at_s=float(fields["opened_at_s"]),
            reported_at_s=float(fields["reported_at_s"]),
            closed_at_s=None if closed_at_s is None else float(closed_at_s),
            stacks=dict(fields["stacks"]),
        )


@dataclass(frozen=True, slots=True)
class VerdictLog:
    """The newest entries, oldest first; the number ever opened of each syndrome; people's notes."""

    entries: tuple[VerdictEntry, ...] = ()
    opened: Mapping[Syndrome, int] = field(default_factory=dict)
    notes: tuple[VerdictNote, ...] = ()

    @property
    def holding(self) -> tuple[VerdictEntry, ...]:
        """The entries that have not ended."""
        return tuple(entry for entry in self.entries if entry.closed_at_s is None)

    def notes_in_force(self, wall_s: float) -> tuple[VerdictNote, ...]:
        """Return the notes that have not ended, also mutes of verdicts that do not hold now."""
        return tuple(note for note in self.notes if note.is_in_force(wall_s))

    def note_on(self, verdict: Verdict, wall_s: float) -> VerdictNote | None:
        """Return the note in force on a verdict: nobody is alerted of one that has any."""
        return next((one for one in self.notes_in_force(wall_s) if one.is_about(verdict)), None)

    def with_note(self, number: int, request: NoteRequest, wall_s: float) -> VerdictLog:
        """Return the log with a person's note on the verdict of this number, or without one.

        Raises:
            KeyError: no verdict of this number holds, nor is one muted.
        """
        notes = self.notes_in_force(wall_s)
        verdicts: dict[int, Verdict | VerdictNote] = {note.number: note for note in notes}
        verdicts |= {entry.number: entry.verdict for entry in self.holding}
        verdict = verdicts[number]
        note = noted(verdict, request, number, wall_s)
        others = tuple(one for one in notes if not one.is_about(verdict))
        return replace(self, notes=others if note is None else (*others, note))

    def with_stacks(self, number: int, rank: int, stacks: Any) -> VerdictLog:
        """Return the log with the stacks of a rank added to an entry."""
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
        return {
            "entries": [entry.to_json() for entry in self.entries],
            "opened": dict(self.opened),
            "notes": [note.to_json() for note in self.notes],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> VerdictLog:
        """Return the log that `to_json` encoded."""
        opened = {Syndrome(name): int(count) for name, count in fields["opened"].items()}
        notes = tuple(map(VerdictNote.from_json, fields.get("notes", ())))
        return cls(tuple(map(VerdictEntry.from_json, fields["entries"])), opened, notes)


@dataclass(frozen=True, slots=True)
class VerdictChanges:
    """The entries that a round opened, and those that it closed."""

    opened: tuple[VerdictEntry, ...] = ()
    closed: tuple[VerdictEntry, ...] = ()


def advance(
    log: VerdictLog, verdicts: Sequence[Verdict], now_s: float, wall_s: float
) -> tuple[VerdictLog, VerdictChanges]:
    """Fold the verdicts of one round into the log.

    Args:
        log: before the round.
        verdicts: all that hold now.
        now_s: the monotonic clock, which the verdicts' `since_s` refer to.
        wall_s: the wall clock at the same instant.
    """
    current: dict[tuple[Subject, Syndrome], Verdict] = {
        (verdict.subject, verdict.syndrome): verdict for verdict in verdicts
    }
    entries: list[VerdictEntry] = []
    closed: list[VerdictEntry] = []
    for entry in log.entries:
        if entry.closed_at_s is None:
            verdict = current.pop((entry.verdict.subject, entry.verdict.syndrome), None)
            if verdict is not None:
                entry = replace(entry, verdict=verdict, reported_at_s=wall_s, reported_now_s=now_s)
            elif entry.reported_now_s is None:
                # How long it was quiet before this daemon started is not known.
                entry = replace(entry, reported_now_s=now_s)
            elif now_s - entry.reported_now_s >= QUIET_S:
                entry = replace(entry, closed_at_s=entry.reported_at_s)
                closed.append(entry)
        entries.append(entry)
    last_number = max((entry.number for entry in log.entries), default=0)
    opened = [
        VerdictEntry(
            number=number,
            verdict=verdict,
            since_s=wall_s - max(0.0, now_s - verdict.since_s),
            opened_at_s=wall_s,
            reported_at_s=wall_s,
            reported_now_s=now_s,
        )
        for number, verdict in enumerate(current.values(), last_number + 1)
    ]
    counts = dict(log.opened)
    for entry in opened:
        counts[entry.verdict.syndrome] = counts.get(entry.verdict.syndrome, 0) + 1
    ended = {entry.number for entry in closed}
    notes = tuple(
        note
        for note in log.notes_in_force(wall_s)
        if note.kind is NoteKind.MUTED or note.number not in ended
    )
    return VerdictLog(_newest([*entries, *opened]), counts, notes), VerdictChanges(
        tuple(opened), tuple(closed)
    )


def _newest(entries: list[VerdictEntry]) -> tuple[VerdictEntry, ...]:
    """Drop the oldest closed entries, so that at most `_KEPT` remain."""
    surplus = len(entries) - _KEPT
    kept = []
    for entry in entries:
        if surplus > 0 and entry.closed_at_s is not None:
            surplus -= 1
        else:
            kept.append(entry)
    return tuple(kept)
