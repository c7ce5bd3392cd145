"""Holds what people decided about verdicts: to mute one for a time, or that somebody looks at it.

A muted verdict is shown as muted; it alerts nobody, and nothing is done about it. An acknowledged
one alerts nobody again until it has ended; what `--act` allows is done all the same. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.verdicts import Subject, Syndrome, Verdict

LONGEST_MUTE_S = 30 * 86400.0
_MAX_NAME, _MAX_REASON = 80, 300


class NoteKind(StrEnum):
    """The kind of a note."""

    MUTED = "muted"
    ACKNOWLEDGED = "acknowledged"


@dataclass(frozen=True, slots=True)
class NoteRequest:
    """A person's decision about a verdict, as it is sent to the daemon.

    Args:
        kind: None: end the verdict's note.
        by: name of the person.
        reason: for other people.
        for_s: how long to mute; 0.0 unless `kind` is MUTED.
    """

    kind: NoteKind | None
    by: str = ""
    reason: str = ""
    for_s: float = 0.0

    def encode(self) -> bytes:
        """Return this as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> NoteRequest:
        """Parse what `encode` or the page has written.

        Raises:
            ProtocolViolation: it is something else, or out of bounds; the message is for people.
        """
        try:
            fields = json.loads(data)
            kind = None if fields["kind"] is None else NoteKind(fields["kind"])
            by, reason = str(fields.get("by", "")).strip(), str(fields.get("reason", "")).strip()
            for_s = float(fields.get("for_s", 0.0))
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ProtocolViolation(f"this is no note on a verdict: {error}") from error
        for name, text, most in (("name", by, _MAX_NAME), ("reason", reason, _MAX_REASON)):
            if kind is not None and not (0 < len(text) <= most and text.isprintable()):
                raise ProtocolViolation(f"give a {name} of 1 to {most} printable characters")
        if kind is NoteKind.MUTED and not (math.isfinite(for_s) and 0 < for_s <= LONGEST_MUTE_S):
            raise ProtocolViolation("mute a verdict for 30 days at most")
        return cls(kind, by, reason, for_s)


@dataclass(frozen=True, slots=True)
class VerdictNote:
    """A note on a verdict. Times are wall-clock seconds since the epoch.

    Args:
        kind: what it says.
        number: of the verdict on which it was made.
        subject: of that verdict; one that opens again is muted, too.
        syndrome: likewise.
        by: name of the person.
        reason: for other people.
        at_s: when it was made.
        until_s: when a mute ends; None: when the verdict has ended.
    """

    kind: NoteKind
    number: int
    subject: Subject
    syndrome: Syndrome
    by: str
    reason: str
    at_s: float
    until_s: float | None

    def is_about(self, verdict: Verdict | VerdictNote) -> bool:
        """Whether the note is on this verdict, or on that of another note."""
        return (self.subject, self.syndrome) == (verdict.subject, verdict.syndrome)

    def is_in_force(self, wall_s: float) -> bool:
        """Whether a mute has not ended yet; an acknowledgement is removed with its verdict."""
        return self.until_s is None or wall_s < self.until_s

    @property
    def text(self) -> str:
        """The note as a sentence."""
        until = (
            ""
            if self.until_s is None
            else f" until {datetime.fromtimestamp(self.until_s, UTC):%Y-%m-%d %H:%M} UTC"
        )
        return f"{self.kind} by {self.by}{until}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the note as JSON."""
        return {**asdict(self), "whom": str(self.subject), "text": self.text}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> VerdictNote:
        """Return the note that `to_json` encoded."""
        subject, until_s = fields["subject"], fields["until_s"]
        return cls(
            kind=NoteKind(fields["kind"]),
            number=int(fields["number"]),
            subject=Subject(subject["kind"], tuple(subject["ranks"]), subject["node"]),
            syndrome=Syndrome(fields["syndrome"]),
            by=str(fields["by"]),
            reason=str(fields["reason"]),
            at_s=float(fields["at_s"]),
            until_s=None if until_s is None else float(until_s),
        )


def noted(
    verdict: Verdict | VerdictNote, request: NoteRequest, number: int, wall_s: float
) -> VerdictNote | None:
    """Return the note that a request makes on a verdict of this number; None if it ends one."""
    if request.kind is None:
        return None
    return VerdictNote(
        kind=request.kind,
        number=number,
        subject=verdict.subject,
        syndrome=verdict.syndrome,
        by=request.by,
        reason=request.reason,
        at_s=wall_s,
        until_s=wall_s + request.for_s if request.kind is NoteKind.MUTED else None,
    )
