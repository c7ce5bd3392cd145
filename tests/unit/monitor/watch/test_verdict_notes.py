"""Claims about what people note on verdicts: whom it is about, how long, and what is refused."""

from __future__ import annotations

import json

import pytest

from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict
from keepstep.monitor.watch.verdict_log import QUIET_S, VerdictLog, advance
from keepstep.monitor.watch.verdict_notes import NoteKind, NoteRequest

SLOW = Verdict(
    Subject("rank", (5,), "node-a"), Syndrome.DATA_STALL, 90.0, ("waits",), 0.9, 0.2, Advice.ALERT
)
MUTE = NoteRequest(NoteKind.MUTED, "ann", "ticket 12", 3600.0)
KNOWN = NoteRequest(NoteKind.ACKNOWLEDGED, "bob", "I look at it")


def holding() -> VerdictLog:
    return advance(VerdictLog(), [SLOW], now_s=100.0, wall_s=1000.0)[0]


def after_its_end(log: VerdictLog) -> VerdictLog:
    return advance(log, [], 100.0 + QUIET_S, 1000.0 + QUIET_S)[0]


def test_mute_holds_for_its_time_though_the_verdict_ends_and_opens_again() -> None:
    log = after_its_end(holding().with_note(1, MUTE, 1000.0))
    assert log.holding == ()
    assert [note.text for note in log.notes_in_force(1010.0)] == [
        "muted by ann until 1970-01-01 01:16 UTC: ticket 12"
    ]
    again, _ = advance(log, [SLOW], 110.0, 1010.0)
    assert again.note_on(SLOW, 4599.0) is not None
    assert again.note_on(SLOW, 4600.0) is None


def test_acknowledgement_ends_with_its_verdict() -> None:
    log = holding().with_note(1, KNOWN, 1000.0)
    assert log.note_on(SLOW, 1e9) is not None
    again, _ = advance(after_its_end(log), [SLOW], 110.0, 1010.0)
    assert again.note_on(SLOW, 1010.0) is None


def test_later_note_replaces_an_earlier_one_and_none_ends_it() -> None:
    log = holding().with_note(1, KNOWN, 1000.0).with_note(1, MUTE, 1001.0)
    assert [note.kind for note in log.notes] == [NoteKind.MUTED]
    log = after_its_end(log)
    # By the number of a verdict that is muted and does not hold, too.
    assert log.with_note(1, NoteRequest(None), 1010.0).notes == ()


def test_verdict_that_does_not_hold_cannot_be_muted() -> None:
    with pytest.raises(KeyError):
        holding().with_note(2, MUTE, 1000.0)
    with pytest.raises(KeyError):
        after_its_end(holding()).with_note(1, MUTE, 1010.0)


def test_notes_survive_saving_and_states_of_before_have_none() -> None:
    log = holding().with_note(1, MUTE, 1000.0)
    saved = json.loads(json.dumps(log.to_json()))
    assert VerdictLog.from_json(saved).notes == log.notes
    del saved["notes"]
    assert VerdictLog.from_json(saved).notes == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "no note"),
        ("{", "no note"),
        ('{"kind": "hidden"}', "no note"),
        ('{"kind": "muted", "by": "", "reason": "r", "for_s": 1}', "give a name"),
        ('{"kind": "muted", "by": "a", "reason": "r\\u001b[2J", "for_s": 1}', "give a reason"),
        ('{"kind": "muted", "by": "a", "reason": "r"}', "30 days"),
        ('{"kind": "muted", "by": "a", "reason": "r", "for_s": 1e9}', "30 days"),
        ('{"kind": "muted", "by": "a", "reason": "r", "for_s": NaN}', "30 days"),
        ('{"kind": "muted", "by": "a", "reason": "r", "for_s": 1' + "0" * 400 + "}", "no note"),
    ],
)
def test_what_is_no_note_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        NoteRequest.decode(text.encode())


def test_request_is_read_as_it_was_written() -> None:
    for request in (MUTE, KNOWN, NoteRequest(None)):
        assert NoteRequest.decode(request.encode()) == request
