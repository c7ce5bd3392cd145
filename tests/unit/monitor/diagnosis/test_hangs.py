"""Tests what is a hang and what is not, and which rank is the root cause."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.diagnosis.conclusion import (
    NO_DIAGNOSIS_STATE,
    DiagnosisState,
    conclude,
    diagnose,
)
from keepstep.monitor.diagnosis.digest import digest
from keepstep.monitor.diagnosis.hangs import find_hangs
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.standstill import FrontierIndex, HangInputs
from keepstep.monitor.diagnosis.tables import FRONTIER, RANK
from keepstep.monitor.diagnosis.thresholds import HangThresholds, Thresholds
from keepstep.monitor.records import Communicator, Ending, Operation
from keepstep.monitor.verdicts import Advice, Verdict
from tests.unit.monitor.diagnosis.trace_text import Trace, parse

HEALTHY = """
node a: 0 1
node b: 2 3
communicator world: 0 1 2 3
communicator left: 0 1
communicator right: 2 3
steps 1-12 every {period}
world all_reduce 4k  0.30-0.40  0.31-0.40  0.32-0.40  0.33-0.40
"""


def trace(last: str = "", period: float = 0.5) -> Trace:
    return parse(
        f"{HEALTHY.format(period=period)}step 13 at {12 * period}\n{last}\nread {12 * period + 0.5}"
    )


def diagnose_at(
    traced: Trace, now_s: float, past: DiagnosisState = NO_DIAGNOSIS_STATE
) -> tuple[Verdict, ...]:
    verdicts = diagnose(traced.job(now_s), {}, past, now_s, Thresholds())[1]
    # The policy and the shown order take it for a probability.
    assert all(0.0 < verdict.confidence <= 1.0 for verdict in verdicts)
    return verdicts


def summarize(verdicts: tuple[Verdict, ...]) -> list[str]:
    return sorted(f"{verdict.syndrome}: {verdict.subject}" for verdict in verdicts)


ABSENT = "world all_reduce 4k  0.30-?     0.31-?     .          0.33-?"


@pytest.mark.parametrize(("period", "patience_s"), [(0.5, 2.4), (2.0, 6.0)])
def test_hang_is_reported_after_some_seconds_or_three_steps_and_not_before(
    period: float, patience_s: float
) -> None:
    traced = trace(ABSENT, period)
    # Rank 2 last made progress when it left the all-reduce of step 12.
    stopped_s = 11 * period + 0.40
    assert diagnose_at(traced, stopped_s + patience_s - 0.05) == ()
    assert summarize(diagnose_at(traced, stopped_s + patience_s + 0.05)) == [
        "non-communication hang: rank 2 on b"
    ]


def test_verdict_on_a_hang_has_infinite_cost_and_a_time_of_onset() -> None:
    (verdict,) = diagnose_at(trace(ABSENT), 12.0)
    assert verdict.cost_s_per_step == float("inf")
    assert verdict.since_s == pytest.approx(11 * 0.5 + 0.40)
    assert "3 ranks wait" in verdict.evidence[1]


def test_onset_stays_while_the_clock_of_a_node_is_not_known() -> None:
    began_s = 90000.0
    traced = parse(f"""
node a: 0 1
node b: 2 3 offset 86400
communicator world: 0 1 2 3
steps 1-12 every 0.5 at {began_s}
world all_reduce 4k  0.30-0.40  0.31-0.40  0.32-0.40  0.33-0.40
step 13 at {began_s + 6.0}
{ABSENT}
loss                 2.5        2.5        nan        2.5
read {began_s + 20.0}
""")
    past, onsets_s = NO_DIAGNOSIS_STATE, list[dict[str, float]]()
    # The monitor of node b restarts between the readings.
    for turn, is_measured in enumerate((False, True, False, True)):
        now_s = began_s + 12.0 + turn
        job = traced.job(now_s)
        if not is_measured:
            job = replace(
                job,
                ranks={
                    rank: replace(records, offset_s=0.0, offset_error_s=np.inf)
                    if records.node == "b"
                    else records
                    for rank, records in job.ranks.items()
                },
            )
        past, verdicts = diagnose(job, {}, past, now_s, Thresholds())
        onsets_s.append({str(verdict.syndrome): verdict.since_s for verdict in verdicts})
    assert (
        onsets_s
        == [
            {
                "non-communication hang": pytest.approx(began_s + 5.90),
                "loss not finite": pytest.approx(began_s + 6.01),
            }
        ]
        * 4
    )


def test_process_that_is_gone_is_not_counted_among_those_that_wait() -> None:
    traced = trace(ABSENT)
    traced.dead = {0}
    assert summarize(diagnose_at(traced, 12.0)) == [
        "dead process: rank 0 on a",
        "non-communication hang: rank 2 on b",
    ]
    hang = next(v for v in diagnose_at(traced, 12.0) if v.subject.ranks == (2,))
    assert "2 ranks wait" in hang.evidence[1]


def test_hang_is_first_shown_and_then_alerted() -> None:
    traced, stopped_s = trace(ABSENT), 11 * 0.5 + 0.40
    (shown,) = diagnose_at(traced, stopped_s + 5.0)
    (alerted,) = diagnose_at(traced, stopped_s + 16.0)
    (later,) = diagnose_at(traced, stopped_s + 1000.0)
    assert [shown.advice, alerted.advice, later.advice] == [
        Advice.OBSERVE,
        Advice.ALERT,
        # Nothing is known of its process.
        Advice.ALERT,
    ]
    assert shown.confidence < alerted.confidence


def test_rank_before_its_step_time_is_known_gets_a_minute() -> None:
    text = "node a: 0 1\ncommunicator world: 0 1\nsteps 1-2 every 1.0\n"
    text += "world all_reduce 4k  0.3-0.4  0.3-0.4\nstep 3 at 2.0\nworld all_reduce 4k  0.3-?  .\n"
    traced = parse(text + "read 70.0")
    past, _ = diagnose(traced.job(0.5), {}, NO_DIAGNOSIS_STATE, 0.5, Thresholds())
    # It last made progress at 1.4 s.
    assert diagnose_at(traced, 61.0, past) == ()
    assert summarize(diagnose_at(traced, 62.0, past)) == ["non-communication hang: rank 1 on a"]


def test_exceptions_in_half_of_the_processes_do_not_blame_the_program() -> None:
    traced = trace("world all_reduce 4k  0.30-?  0.31-?  .  .")
    traced.dead, traced.endings = {2, 3}, dict.fromkeys((2, 3), Ending.RAISED)
    assert summarize(diagnose_at(traced, 7.0)) == ["dead process: node b (ranks 2, 3)"]
    traced = trace("world all_reduce 4k  .  0.31-?  .  .")
    traced.dead, traced.endings = {0, 2, 3}, dict.fromkeys((0, 2, 3), Ending.RAISED)
    assert summarize(diagnose_at(traced, 7.0)) == ["dead process: the whole job"]


@pytest.mark.parametrize(("of_step", "held_until"), [(13, 23), (3, 22)])
def test_completed_mismatch_holds_for_ten_steps_after_it_was_found(
    of_step: int, held_until: int
) -> None:
    # Steps take 10 s: the minute for which it holds at least is over before. It is found while step
    # 12 is the newest complete one, whichever step its records name.
    text = HEALTHY.format(period=10.0)
    traced = parse(text + "step 13 at 120.0\nread 400.0")
    for rank, nbytes in enumerate((4096, 4096, 2048, 4096)):
        traced.operation(
            rank, "world", Operation.ALL_REDUCE, 120.1, 120.2, nbytes=nbytes, step=of_step
        )
    for step in range(13, 40):
        for rank in range(4):
            began_s = 10.0 * (step - 1) + 0.3
            traced.operation(rank, "world", Operation.ALL_REDUCE, began_s, began_s + 0.1, step=step)
    past, held = NO_DIAGNOSIS_STATE, {}
    for second in range(5, 390, 10):
        now_s = float(second)
        past, verdicts = diagnose(traced.job(now_s, now_s - 20.0), {}, past, now_s, Thresholds())
        held[past.window.newest] = any(
            verdict.syndrome == "mismatched collectives" for verdict in verdicts
        )
    assert max(step for step, holds in held.items() if holds) == held_until


def test_rank_whose_records_are_not_read_is_not_blamed() -> None:
    traced = trace(ABSENT)
    traced.read_of = {2: 6.2}
    past = NO_DIAGNOSIS_STATE
    for now_s in (6.2, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0):
        past, verdicts = diagnose(traced.job(now_s), {}, past, now_s, Thresholds())
        assert verdicts == (), f"at {now_s} s"


def test_ranks_that_no_monitor_reports_any_more_are_reported_as_long_as_others_wait() -> None:
    traced = trace("world all_reduce 4k  0.30-?     0.31-?     .          .")
    for now_s in (22.0, 400.0):
        job = traced.job(now_s)
        job = replace(job, ranks={rank: job.ranks[rank] for rank in (0, 1)})
        _, (lost,) = diagnose(job, {}, NO_DIAGNOSIS_STATE, now_s, Thresholds())
        assert summarize((lost,)) == ["dead process: group 2, 3"]
        assert (lost.advice, lost.confidence) == (Advice.ALERT, 0.5)
        assert lost.evidence[0] == "no monitor reports ranks 2, 3"
        assert "2 ranks wait directly" in lost.evidence[1]


def test_rank_that_no_monitor_reports_is_not_reported_before_others_have_waited_for_long() -> None:
    traced = trace("world all_reduce 4k  0.30-?     0.31-?     .          .")
    job = traced.job(6.0 + 15.0)
    job = replace(job, ranks={rank: job.ranks[rank] for rank in (0, 1)})
    assert diagnose(job, {}, NO_DIAGNOSIS_STATE, 21.0, Thresholds())[1] == ()


def test_rank_of_a_silent_node_is_reported_dead_with_low_confidence() -> None:
    traced = trace(ABSENT)
    traced.read_of = {2: 6.2}
    past, verdicts = NO_DIAGNOSIS_STATE, ()
    for tenth in range(62, 400, 5):
        past, verdicts = diagnose(traced.job(tenth / 10), {}, past, tenth / 10, Thresholds())
    assert summarize(verdicts) == ["dead process: rank 2 on b"]
    assert 0.0 < verdicts[0].confidence <= 0.5
    assert verdicts[0].advice is Advice.ALERT


def test_idle_job_is_not_a_hang() -> None:
    assert diagnose_at(trace(), 600.0) == ()


def test_rank_that_makes_progress_elsewhere_is_not_a_root_cause() -> None:
    traced = trace("world all_reduce 4k  0.30-?  0.31-?  .  .")
    for tenth in range(62, 200):
        for rank in (2, 3):
            traced.operation(
                rank, "right", Operation.ALL_REDUCE, tenth / 10, tenth / 10 + 0.05, step=13
            )
    assert diagnose_at(traced, 19.9) == ()


def test_operation_without_recorded_end_is_no_hang_once_a_later_one_ended() -> None:
    traced = trace(
        "left all_reduce 4k  0.05-?  0.05-?  .  .\nleft all_reduce 4k  0.06-0.07  0.06-0.07  .  ."
    )
    assert diagnose_at(traced, 60.0) == ()


def test_operation_without_recorded_end_is_forgotten_after_some_steps() -> None:
    text = HEALTHY.format(period=0.5) + (
        "step 13 at 6.0\nleft all_reduce 4k async  0.05-?  .  .  .\n"
        "steps 13-20 every 0.5 at 6.0\n"
        "world all_reduce 4k  0.30-0.40  0.31-0.40  0.32-0.40  0.33-0.40\nread 60.0"
    )
    assert diagnose_at(parse(text), 60.0) == ()


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 6))
def test_frontiers_of_a_communicator_are_found(communicators: list[int], wanted: int) -> None:
    frontiers = np.zeros(len(communicators), FRONTIER)
    frontiers["communicator"] = communicators
    expected = [place for place, identity in enumerate(communicators) if identity == wanted]
    assert FrontierIndex(frontiers).places_of(wanted).tolist() == expected


def looked_at(pairs: int) -> int:
    """Return how many frontiers are looked at if all ranks are in pairs, and all pairs stuck."""
    count = 0

    class Counted(np.ndarray):
        """A table, or a column of it."""

        def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
            nonlocal count
            count += max(np.size(value) for value in inputs)
            return getattr(function, method)(*map(np.asarray, inputs), **options)

        def argsort(self, *arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += self.size
            return np.asarray(self).argsort(*arguments, **options)

    size = 2 * pairs
    ranks, frontiers = np.zeros(size, RANK), np.zeros(size, FRONTIER)
    ranks["rank"] = frontiers["rank"] = np.arange(size)
    ranks["alive"], ranks["phase"], ranks["read_at_s"] = True, -1, 1000.0
    frontiers["communicator"] = frontiers["rank"] // 2
    frontiers["peer"], frontiers["entered"], frontiers["began"], frontiers["open"] = -1, 5, 5, 5
    verdicts = find_hangs(
        HangInputs(
            ranks=ranks,
            frontiers=frontiers.view(Counted),
            communicators={
                pair: Communicator(pair, f"pair {pair}", (2 * pair, 2 * pair + 1))
                for pair in range(pairs)
            },
            nodes=dict.fromkeys(range(size), "a"),
            unread_s=np.zeros(size),
            stopped=frozenset(),
            step_s=1.0,
        ),
        HangThresholds(),
    )
    assert len(verdicts) == pairs
    return count


def test_cost_of_a_standstill_does_not_grow_with_the_square_of_the_ranks() -> None:
    """A look at all frontiers for each stuck operation would take sixteen times as long."""
    assert looked_at(pairs=64) < 5 * looked_at(pairs=16)


def test_stopped_process_is_named_if_all_have_begun_the_operation() -> None:
    traced = trace("world all_reduce 4k  0.30-?  0.31-?  0.32-?  0.33-?")
    metrics = {"a": NodeMetrics("a", 10.0, stopped_ranks=(1,))}
    _, verdicts = diagnose(traced.job(10.0), metrics, NO_DIAGNOSIS_STATE, 10.0, Thresholds())
    assert summarize(verdicts) == ["non-communication hang: rank 1 on a"]
    (verdict,) = verdicts
    assert "rank 1: a signal has stopped its process" in "; ".join(verdict.evidence)


@pytest.mark.parametrize(
    ("stopped_ranks", "subject"),
    [((2, 3), "node b (ranks 2, 3)"), ((1, 2), "group 1, 2")],
)
def test_stopped_processes_are_named_as_a_node_only_if_they_are_all_of_its_own(
    stopped_ranks: tuple[int, ...], subject: str
) -> None:
    traced = trace("world all_reduce 4k  0.30-?  0.31-?  0.32-?  0.33-?")
    metrics = {
        node: NodeMetrics(
            node,
            10.0,
            stopped_ranks=tuple(rank for rank in stopped_ranks if traced.nodes[rank] == node),
        )
        for node in "ab"
    }
    _, verdicts = diagnose(traced.job(10.0), metrics, NO_DIAGNOSIS_STATE, 10.0, Thresholds())
    assert summarize(verdicts) == [f"non-communication hang: {subject}"]


@pytest.mark.parametrize("last", ["0.31-?", "."])
def test_stopped_process_is_named_in_seconds_also_in_the_first_step(last: str) -> None:
    text = f"""
node a: 0 1
communicator world: 0 1
step 1 at 1.0
world all_reduce 4k  0.10-0.20  0.10-0.20
world all_reduce 4k  0.30-?     {last}
read 10.0
"""
    metrics = {"a": NodeMetrics("a", 5.0, stopped_ranks=(1,))}
    _, verdicts = diagnose(parse(text).job(5.0), metrics, NO_DIAGNOSIS_STATE, 5.0, Thresholds())
    assert summarize(verdicts) == ["non-communication hang: rank 1 on a"]


def test_rank_with_the_fewest_launches_is_named_if_all_have_begun_the_operation() -> None:
    traced = trace(
        "world all_reduce 4k async  0.30-?  0.31-?  0.32-?  0.33-?\n"
        "world all_reduce 4k async  0.35-?  0.35-?  0.35-?  ."
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: rank 3 on b"]


def test_node_whose_ranks_all_have_the_fewest_launches_is_named_as_a_node() -> None:
    traced = parse("""
node a: 0 1 2
node b: 3 4
communicator world: 0 1 2 3 4
steps 1-12 every 0.5
world all_reduce 4k  0.30-0.40  0.31-0.40  0.32-0.40  0.33-0.40  0.34-0.40
step 13 at 6.0
world all_reduce 4k async  0.30-?  0.31-?  0.32-?  0.33-?  0.34-?
world all_reduce 4k async  0.35-?  0.35-?  0.35-?  .       .
read 6.5
""")
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: node b (ranks 3, 4)"]


def test_ranks_that_cannot_leave_are_named_if_most_have_left() -> None:
    traced = trace("world all_reduce 4k  0.30-0.40  0.31-0.40  0.32-?  0.33-0.40")
    assert summarize(diagnose_at(traced, 12.0)) == ["communication hang: rank 2 on b"]


def test_group_that_cannot_leave_is_named_without_certainty() -> None:
    cells = ["0.30-0.40", "0.31-?", "0.32-0.40", "0.33-0.40", "0.34-?", "0.35-0.40"]
    traced = parse(
        "node a: 0 1 2\nnode b: 3 4 5\ncommunicator world: 0 1 2 3 4 5\nsteps 1-12 every 0.5\n"
        f"world all_reduce 4k {' '.join(['0.30-0.40'] * 6)}\nstep 13 at 6.0\n"
        f"world all_reduce 4k {' '.join(cells)}\nread 6.5"
    )
    (verdict,) = diagnose_at(traced, 12.0)
    assert summarize((verdict,)) == ["communication hang: group 1, 4"]
    assert "4 ranks have left it, 2 have not" in verdict.evidence


def test_two_independent_hangs_are_both_named() -> None:
    traced = trace("left all_reduce 4k  0.1-?  .  .  .\nright all_reduce 4k  .  .  .  0.1-?")
    assert summarize(diagnose_at(traced, 12.0)) == [
        "non-communication hang: rank 1 on a",
        "non-communication hang: rank 2 on b",
    ]


def test_node_whose_ranks_all_hang_is_named_as_a_node() -> None:
    traced = trace("world all_reduce 4k  0.30-?  0.31-?  .  .")
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: node b (ranks 2, 3)"]


def test_cycle_of_messages_is_a_deadlock() -> None:
    traced = trace(
        "world receive 1k <-1  0.1-?  .  .  .\n"
        "world receive 1k <-2  .  0.1-?  .  .\n"
        "world receive 1k <-0  .  .  0.1-?  ."
    )
    (verdict,) = diagnose_at(traced, 12.0)
    assert summarize((verdict,)) == ["mismatched collectives: group 0, 1, 2"]
    assert "0 -> 1 -> 2 -> 0" in verdict.evidence[0]


def test_posted_receive_of_a_hanging_rank_is_not_a_deadlock() -> None:
    # Rank 1 has posted a receive and then hangs in its own code; rank 0 waits for it in `left`, and
    # would send after that.
    traced = trace(
        "world receive 1k <-0 async  .  0.05-?  .  .\nleft all_reduce 4k  0.45-?  .  .  ."
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: rank 1 on a"]


def test_posted_receive_of_a_rank_that_stopped_with_the_others_may_be_a_deadlock() -> None:
    traced = trace(
        "left all_reduce 4k  0.05-?  .  .  .\nworld receive 1k <-0 async  .  0.45-?  .  ."
    )
    (verdict,) = diagnose_at(traced, 12.0)
    assert summarize((verdict,)) == ["mismatched collectives: group 0, 1 on a"]
    assert verdict.confidence == 0.6


def test_root_cause_is_found_through_a_chain_of_communicators() -> None:
    chain = 40
    text = "node a: " + " ".join(map(str, range(chain))) + "\n"
    text += "".join(f"communicator c{rank:02d}: {rank} {rank + 1}\n" for rank in range(chain - 1))
    text += f"communicator world: {' '.join(map(str, range(chain)))}\n"
    text += (
        "steps 1-6 every 1.0\nworld all_reduce 4k "
        + " ".join(["0.30-0.40"] * chain)
        + "\nstep 7 at 6.0\n"
    )
    for rank in range(chain - 1):
        cells = ["."] * chain
        cells[rank] = "0.30-?"
        text += f"c{rank:02d} all_reduce 4k " + " ".join(cells) + "\n"
    assert summarize(diagnose_at(parse(text + "read 20.0"), 20.0)) == [
        f"non-communication hang: rank {chain - 1} on a"
    ]


def test_uneven_gathers_are_not_a_mismatch() -> None:
    traced = trace(
        "world all_gather 4k  0.30-?  .  .  .\nworld all_gather 2k  .  0.31-?  .  0.33-?"
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: rank 2 on b"]


def test_mismatch_without_majority_names_the_group() -> None:
    traced = trace(
        "world all_reduce 4k  0.30-?  0.31-?  .  .\nworld broadcast 4k root=0  .  .  0.32-?  0.33-?"
    )
    (verdict,) = diagnose_at(traced, 12.0)
    assert summarize((verdict,)) == ["mismatched collectives: group 0, 1, 2, 3"]
    assert verdict.confidence < 0.7
    assert verdict.evidence[0] == "ranks call different operations in group world"
    assert any(
        "all_reduce of 4096 bytes of float32 at rank 0, 1" in line for line in verdict.evidence
    )


def test_mismatch_that_completes_is_reported() -> None:
    traced = trace(
        "world all_reduce 4k  0.30-0.40  0.31-0.40  .  0.33-0.40\n"
        "world all_reduce 2k  .  .  0.32-0.40  .\n"
    )
    (verdict,) = diagnose_at(traced, 6.5)
    assert verdict.syndrome == "mismatched collectives"
    assert 2 in verdict.subject.ranks


def test_dead_process_that_was_not_needed_is_not_reported() -> None:
    traced = trace()
    traced.dead = {3}
    assert diagnose_at(traced, 60.0) == ()


def test_failed_operations_of_survivors_show_that_a_dead_process_was_needed() -> None:
    traced = trace("world all_reduce 4k failed  0.30-0.45  0.31-0.45  .  0.33-0.45")
    traced.dead = {2}
    assert summarize(diagnose_at(traced, 6.6)) == ["dead process: rank 2 on b"]


def test_rank_missing_in_an_earlier_operation_is_the_root_cause_of_later_ones() -> None:
    # All but rank 2 have begun the barrier as well; the barrier's missing rank is the one missing
    # in the gather before it.
    traced = trace(
        "world gather 4k root=3 async  0.1-0.2  0.1-0.2  .  0.1-?\n"
        "world barrier 0  0.3-?  0.3-?  .  0.3-?"
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: rank 2 on b"]


def test_uneven_gather_that_all_have_begun_and_that_does_not_end_is_a_mismatch() -> None:
    traced = trace(
        "world all_gather 4k  0.30-?  .  0.30-?  0.30-?\nworld all_gather 2k  .  0.31-?  .  ."
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["mismatched collectives: group 0, 1, 2, 3"]


def test_operation_is_stuck_only_after_the_last_rank_has_waited_long() -> None:
    traced = trace("world all_reduce 4k  0.30-?  0.31-?  2.50-?  0.33-?")
    assert diagnose_at(traced, 10.8) == ()
    assert summarize(diagnose_at(traced, 11.0)) == ["communication hang: group 0, 1, 2, 3"]


def test_mismatch_in_the_first_step_is_reported_without_delay() -> None:
    text = "node a: 0 1 2\ncommunicator world: 0 1 2\nstep 1 at 1.0\n"
    text += "world all_reduce 4k  0.3-?  0.3-?  .\n"
    traced = parse(text + "world all_reduce 8k  .  .  0.3-?\nread 4.0")
    assert summarize(diagnose_at(traced, 4.0)) == ["mismatched collectives: rank 2 on a"]


def test_failures_reported_before_the_death_was_read_still_count() -> None:
    traced = trace("world all_reduce 4k failed  0.30-0.35  0.31-0.35  .  0.33-0.35")
    past, verdicts = diagnose(traced.job(6.4), {}, NO_DIAGNOSIS_STATE, 6.4, Thresholds())
    assert verdicts == ()
    traced.dead = {0, 1, 2, 3}
    # Like a daemon's next digest, the next reading does not include operations that had ended
    # before.
    assert summarize(diagnose(traced.job(6.9, since_s=6.4), {}, past, 6.9, Thresholds())[1]) == [
        "dead process: rank 2 on b"
    ]


def test_failure_long_before_an_end_does_not_count() -> None:
    traced = parse("""
node a: 0 1
communicator world: 0 1
steps 1-12 every 0.5
world all_reduce 4k         0.30-0.40  0.31-0.40
step 13 at 6.0
world all_reduce 4k failed  0.30-0.32  .
steps 14-60 every 0.5
world all_reduce 4k         6.80-6.90  6.81-6.90
finished 1
read 33.0
""")
    finished, past, now_s = traced.dead, NO_DIAGNOSIS_STATE, 0.5
    traced.dead = set()
    while now_s <= traced.read_s:
        past, verdicts = diagnose(traced.job(now_s, now_s - 4.0), {}, past, now_s, Thresholds())
        now_s += 0.5
    traced.dead = finished
    for later_s in (0.5, 1.0, 1.5):
        past, verdicts = diagnose(traced.job(), {}, past, traced.read_s + later_s, Thresholds())
        assert summarize(verdicts) == []


def test_rank_reported_by_two_nodes_at_once_is_still_diagnosed() -> None:
    traced = trace(ABSENT)
    job = traced.job(6.0)
    once = digest(job.ranks.values(), job.communicators)[1]
    gone = once.ranks[1:2].copy()
    gone["alive"] = False
    twice = replace(once, ranks=np.concatenate([once.ranks, gone]))
    nodes = {rank: records.node for rank, records in job.ranks.items()}
    past, verdicts = conclude(
        twice, job.communicators, nodes, {}, NO_DIAGNOSIS_STATE, 6.0, Thresholds()
    )
    assert (past.ranks["rank"].tolist(), past.ranks["alive"].all(), verdicts) == (
        [0, 1, 2, 3],
        True,
        (),
    )
    later = traced.job(12.0)
    later_digest = digest(later.ranks.values(), later.communicators)[1]
    _, verdicts = conclude(later_digest, job.communicators, nodes, {}, past, 12.0, Thresholds())
    assert summarize(verdicts) == ["non-communication hang: rank 2 on b"]


DEVICE_HEALTHY = """
node a: 0 1
node b: 2 3
communicator world: 0 1 2 3
communicator left: 0 1
communicator right: 2 3
steps 1-12 every 0.5
world all_reduce 4k  0.10+0.30-0.40  0.10+0.31-0.40  0.10+0.32-0.40  0.10+0.33-0.40
step 13 at 6.0
"""


def on_device(last: str) -> Trace:
    return parse(f"{DEVICE_HEALTHY}{last}\nread 12.0")


def test_rank_whose_device_has_not_begun_what_it_called_is_the_late_one() -> None:
    """All hosts have called three operations; the device of rank 2 is stuck before the first."""
    traced = on_device(
        "world all_reduce 4k  0.10+0.30-?  0.10+0.31-?  0.10+?-?  0.10+0.33-?\n"
        "world all_reduce 4k  0.12+?-?     0.12+?-?     0.12+?-?  0.12+?-?\n"
        "world all_reduce 4k  0.14+?-?     0.14+?-?     .         0.14+?-?"
    )
    (verdict,) = diagnose_at(traced, 12.0)
    assert summarize((verdict,)) == ["non-communication hang: rank 2 on b"]
    assert (
        "has called operation 13 of group world, and its device runs earlier work"
        in (verdict.evidence[0])
    )
    assert "3 ranks wait for it" in verdict.evidence[1]


def test_batch_that_the_host_loads_does_not_explain_what_its_device_has_not_begun() -> None:
    traced = on_device(
        "data_wait            .            .            0.20-?    .\n"
        "world all_reduce 4k  0.10+0.30-?  0.10+0.31-?  0.10+?-?  0.10+0.33-?"
    )
    assert "non-communication hang: rank 2 on b" in summarize(diagnose_at(traced, 60.0))


def test_rank_whose_device_waits_in_another_group_is_not_at_fault() -> None:
    """Rank 0 does not come to the group of 0 and 1, so rank 1 is late where 2 and 3 wait."""
    traced = on_device(
        "left all_reduce 4k   .  0.10+0.20-?  .            .\n"
        "world all_reduce 4k  .  0.12+?-?     0.10+0.30-?  0.10+0.33-?"
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: rank 0 on a"]


def test_device_of_each_rank_that_is_stuck_before_its_operation_is_reported() -> None:
    traced = on_device("world all_reduce 4k  0.10+?-?  0.10+?-?  0.10+?-?  0.10+?-?")
    verdicts = diagnose_at(traced, 12.0)
    assert {rank for verdict in verdicts for rank in verdict.subject.ranks} == {0, 1, 2, 3}
    assert {str(verdict.syndrome) for verdict in verdicts} == {"non-communication hang"}
    assert any("has waited for its own device" in line for line in verdicts[0].evidence)


def test_devices_that_wait_for_each_other_are_a_deadlock() -> None:
    traced = parse("""
node a: 0 1
communicator first: 0 1
communicator second: 0 1
steps 1-12 every 0.5
first all_reduce 4k  0.30+0.30-0.40  0.31+0.31-0.40
step 13 at 6.0
first all_reduce 4k   0.10+0.30-?  0.10+?-?
second all_reduce 4k  0.10+?-?     0.10+0.30-?
read 20.0
""")
    assert summarize(diagnose_at(traced, 20.0)) == ["mismatched collectives: group 0, 1 on a"]


def test_operation_that_all_devices_have_begun_is_stuck_however_far_hosts_have_called() -> None:
    traced = on_device(
        "world all_reduce 4k  0.10+0.30-?  0.10+0.31-?  0.10+0.32-?  0.10+0.33-?\n"
        "world all_reduce 4k  0.12+?-?     0.12+?-?     .            0.12+?-?"
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["communication hang: group 0, 1, 2, 3"]


def test_rank_whose_host_is_in_the_call_waits_for_those_who_have_not_called() -> None:
    """NCCL connects in the first call of a group, and waits there on the host for all ranks."""
    traced = on_device("world all_reduce 4k  0.10+-?  0.10+-?  .  0.10+-?")
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: rank 2 on b"]


def test_host_whose_device_takes_no_more_work_does_not_wait_for_others() -> None:
    traced = on_device(
        "world all_reduce 4k  0.10+0.30-?  0.10+0.31-?  0.10+?-?  0.10+0.33-?\n"
        "right all_reduce 4k  .            .            0.20+-?   .\n"
    )
    assert summarize(diagnose_at(traced, 12.0)) == ["non-communication hang: rank 2 on b"]


def test_receiver_whose_device_has_not_begun_is_missing_in_a_message() -> None:
    traced = parse("""
node a: 0 1
communicator pair: 0 1
steps 1-12 every 0.5
pair send 1k ->1     0.20+0.30-0.40  .
pair receive 1k <-0  .               0.20+0.30-0.40
step 13 at 6.0
pair send 1k ->1     0.20+0.30-?  .
pair receive 1k <-0  .            0.20+?-?
read 20.0
""")
    (verdict,) = diagnose_at(traced, 20.0)
    assert summarize((verdict,)) == ["non-communication hang: rank 1 on a"]
    assert "rank 1 has called message 13 of group pair" in verdict.evidence[0]


def test_operations_whose_end_cannot_be_seen_are_waited_for_by_nobody() -> None:
    """NCCL before 2.28 and asynchronous calls: nothing but the call is known."""
    traced = parse("""
node a: 0 1
communicator world: 0 1
communicator first: 0
communicator second: 1
steps 1-12 every 0.5
world all_reduce 4k async  0.30-!     0.31-!
first all_reduce 4k        0.40-0.45  .
second all_reduce 4k       .          0.40-0.45
step 13 at 6.0
world all_reduce 4k async  0.30-!     .
read 60.0
""")
    assert diagnose_at(traced, 60.0) == ()


PIPELINE = """
node a: 0
node b: 1
node c: 2
communicator pipe: 0 1 2
steps 1-14 every 0.5
{messages}
step 15 at 7.0
{last}
step 16 at 8.6
{messages}
step 17 at 9.1
pipe send 32k ->1     0.05-?     .           .
pipe receive 32k <-0  .          0.04-?      .
pipe receive 32k <-1  .          .           0.04-?
read 30.0
"""
MESSAGES = """
pipe send 32k ->1     0.05-{ends}    .            .
pipe receive 32k <-0  .              0.04-{ends}  .
pipe send 32k ->2     .              1.46-1.47    .
pipe receive 32k <-1  .              .            0.04-1.47
"""


@pytest.mark.parametrize(
    ("last_ends", "waits_s", "advice"),
    [
        ("0.06", 2.0, None),
        ("0.06", 3.0, Advice.OBSERVE),
        ("1.45", 3.0, None),
        ("1.45", 5.0, Advice.OBSERVE),
        ("0.06", 16.0, Advice.ALERT),
    ],
    ids=["short", "long", "packets lost before", "longer than those take", "too long for packets"],
)
def test_message_that_takes_long_is_reported_later_where_others_did_and_alerted_to_much_later(
    last_ends: str, waits_s: float, advice: Advice | None
) -> None:
    """Packets are sent again after 0.2, 0.6, 1.4 and 3 s: people were alerted to a hang by that."""
    usual = MESSAGES.format(ends="0.06").replace("1.4", "0.1")
    traced = parse(PIPELINE.format(messages=usual, last=MESSAGES.format(ends=last_ends)))
    at_s = 9.15 + waits_s
    verdicts = diagnose_at(traced, at_s)
    assert summarize(verdicts) == ["communication hang: link 0 -> 1"] * (advice is not None)
    assert all(verdict.advice is advice for verdict in verdicts)
