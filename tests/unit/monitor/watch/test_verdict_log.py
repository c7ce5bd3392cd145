"""Claims about the log: a verdict opens and closes once though it flickers, and survives saving."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict
from keepstep.monitor.watch.verdict_log import QUIET_S, VerdictLog, advance

SLOW = Verdict(
    Subject("rank", (5,), "node-a"), Syndrome.DATA_STALL, 90.0, ("waits",), 0.9, 0.2, Advice.ALERT
)
HANG = replace(SLOW, syndrome=Syndrome.NON_COMMUNICATION_HANG, cost_s_per_step=float("inf"))


def test_verdict_opens_once_updates_its_evidence_and_closes_at_its_last_report() -> None:
    log, changes = advance(VerdictLog(), [SLOW], now_s=100.0, wall_s=1000.0)
    assert [entry.since_s for entry in changes.opened] == [990.0]
    fresher = replace(SLOW, evidence=("waits longer",))
    log, changes = advance(log, [fresher], 101.0, 1001.0)
    assert (changes.opened, changes.closed) == ((), ())
    assert log.holding[0].verdict.evidence == ("waits longer",)
    log, changes = advance(log, [], 102.0, 1002.0)
    assert changes.closed == ()
    log, changes = advance(log, [], 101.0 + QUIET_S, 1001.0 + QUIET_S)
    assert [entry.closed_at_s for entry in changes.closed] == [1001.0]
    assert log.holding == ()
    log, changes = advance(log, [SLOW], 110.0, 1010.0)
    assert [entry.number for entry in changes.opened] == [2]
    assert log.opened == {Syndrome.DATA_STALL: 2}


@pytest.mark.parametrize("jump_s", [-1800.0, 1800.0])
def test_wall_clock_that_is_set_neither_holds_nor_ends_a_verdict(jump_s: float) -> None:
    log, _ = advance(VerdictLog(), [SLOW], now_s=100.0, wall_s=5000.0)
    log, changes = advance(log, [], 99.0 + QUIET_S, 5000.0 + jump_s)
    assert changes.closed == ()
    _, changes = advance(log, [], 100.0 + QUIET_S, 5001.0 + jump_s)
    assert len(changes.closed) == 1


def test_verdict_of_an_earlier_daemon_ends_if_this_one_does_not_find_it() -> None:
    log, _ = advance(VerdictLog(), [SLOW], now_s=9000.0, wall_s=5000.0)
    log = VerdictLog.from_json(json.loads(json.dumps(log.to_json())))
    # The machine was started again, and its monotonic clock with it.
    log, changes = advance(log, [], 10.0, 5100.0)
    assert changes.closed == ()
    _, changes = advance(log, [], 10.0 + QUIET_S, 5105.0)
    assert [entry.closed_at_s for entry in changes.closed] == [5000.0]


@given(st.lists(st.booleans(), max_size=60))
def test_verdict_that_flickers_faster_than_the_quiet_time_opens_once(holds: list[bool]) -> None:
    log, opened = VerdictLog(), 0
    for second, is_holding in enumerate([True, *holds]):
        verdicts = [SLOW] if is_holding or second % 4 == 0 else []
        log, changes = advance(log, verdicts, 100.0 + second, 1000.0 + second)
        opened += len(changes.opened)
        assert changes.closed == ()
    assert opened == 1


def test_log_survives_encoding_with_stacks_and_an_infinite_cost() -> None:
    log, _ = advance(VerdictLog(), [SLOW, HANG], 100.0, 1000.0)
    log = log.with_stacks(2, 5, {"threads": []})
    assert VerdictLog.from_json(json.loads(json.dumps(log.to_json()))) == log
    assert log.entries[1].stacks == {"5": {"threads": []}}
    assert log.entries[0].stacks == {}


def test_only_closed_entries_are_dropped() -> None:
    log, _ = advance(VerdictLog(), [HANG], 0.0, 0.0)
    for turn in range(1, 400):
        verdicts = [HANG, replace(SLOW, subject=Subject("rank", (turn,), ""))]
        log, _ = advance(log, verdicts, 10.0 * turn, 10.0 * turn)
    assert log.entries[0].number == 1
    assert len(log.entries) <= 201
    assert log.opened[Syndrome.DATA_STALL] == 399
