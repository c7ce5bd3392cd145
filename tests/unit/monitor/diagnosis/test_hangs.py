"""What is a hang and what is not, and who is at the root of one."""

from dataclasses import replace

import numpy as np
import pytest

from keepstep.monitor.diagnosis.conclusion import (
    NO_DIAGNOSIS_STATE,
    DiagnosisState,
    conclude,
    diagnose,
)
from keepstep.monitor.diagnosis.digest import digest
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.records import Operation
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


def at(one: Trace, now_s: float, past: DiagnosisState = NO_DIAGNOSIS_STATE) -> tuple[Verdict, ...]:
    return diagnose(one.job(now_s), {}, past, now_s, Thresholds())[1]


def told(verdicts: tuple[Verdict, ...]) -> list[str]:
    return sorted(f"{one.syndrome}: {one.subject}" for one in verdicts)


ABSENT = "world all_reduce 4k  0.30-?     0.31-?     .          0.33-?"


@pytest.mark.parametrize(("period", "patience_s"), [(0.5, 2.4), (2.0, 6.0)])
def test_hang_is_told_after_some_seconds_or_three_steps_and_not_before(
    period: float, patience_s: float
) -> None:
    one = trace(ABSENT, period)
    # Rank 2 was last seen when it left the all-reduce of step 12.
    stopped_s = 11 * period + 0.40
    assert at(one, stopped_s + patience_s - 0.05) == ()
    assert told(at(one, stopped_s + patience_s + 0.05)) == ["non-communication hang: rank 2 on b"]


def test_verdict_on_a_hang_costs_without_end_and_says_since_when() -> None:
    (verdict,) = at(trace(ABSENT), 12.0)
    assert verdict.cost_s_per_step == float("inf")
    assert verdict.since_s == pytest.approx(11 * 0.5 + 0.40)
    assert verdict.advice is Advice.RESTART_WORKER
    assert "3 ranks wait" in verdict.evidence[1]


def test_rank_whose_records_are_not_read_is_not_blamed() -> None:
    one = trace(ABSENT)
    one.read_of = {2: 6.2}
    past = NO_DIAGNOSIS_STATE
    for now_s in (6.2, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0):
        past, verdicts = diagnose(one.job(now_s), {}, past, now_s, Thresholds())
        assert verdicts == (), f"at {now_s} s"


def test_rank_whose_node_tells_nothing_for_long_is_told_as_gone_with_little_confidence() -> None:
    one = trace(ABSENT)
    one.read_of = {2: 6.2}
    past, verdicts = NO_DIAGNOSIS_STATE, ()
    for tenth in range(62, 400, 5):
        past, verdicts = diagnose(one.job(tenth / 10), {}, past, tenth / 10, Thresholds())
    assert told(verdicts) == ["dead process: rank 2 on b"]
    assert verdicts[0].confidence <= 0.5
    assert verdicts[0].advice is Advice.ALERT


def test_everybody_idle_is_no_hang() -> None:
    assert at(trace(), 600.0) == ()


def test_rank_that_keeps_moving_elsewhere_is_no_root() -> None:
    one = trace("world all_reduce 4k  0.30-?  0.31-?  .  .")
    for tenth in range(62, 200):
        for rank in (2, 3):
            one.operation(
                rank, "right", Operation.ALL_REDUCE, tenth / 10, tenth / 10 + 0.05, step=13
            )
    assert at(one, 19.9) == ()


def test_operation_that_never_told_its_end_is_no_hang_once_a_later_one_ended() -> None:
    one = trace(
        "left all_reduce 4k  0.05-?  0.05-?  .  .\nleft all_reduce 4k  0.06-0.07  0.06-0.07  .  ."
    )
    assert at(one, 60.0) == ()


def test_operation_that_never_told_its_end_is_forgotten_when_its_rank_is_steps_on() -> None:
    text = HEALTHY.format(period=0.5) + (
        "step 13 at 6.0\nleft all_reduce 4k async  0.05-?  .  .  .\n"
        "steps 13-20 every 0.5 at 6.0\nworld all_reduce 4k  0.30-0.40  0.31-0.40  0.32-0.40  0.33-0.40\nread 60.0"
    )
    assert at(parse(text), 60.0) == ()


def test_stopped_process_is_named_though_all_have_begun() -> None:
    one = trace("world all_reduce 4k  0.30-?  0.31-?  0.32-?  0.33-?")
    metrics = {"a": NodeMetrics("a", 10.0, stopped_ranks=(1,))}
    _, verdicts = diagnose(one.job(10.0), metrics, NO_DIAGNOSIS_STATE, 10.0, Thresholds())
    assert told(verdicts) == ["non-communication hang: rank 1 on a"]


def test_rank_with_the_fewest_launches_is_named_where_all_have_begun() -> None:
    one = trace(
        "world all_reduce 4k async  0.30-?  0.31-?  0.32-?  0.33-?\nworld all_reduce 4k async  0.35-?  0.35-?  0.35-?  ."
    )
    assert told(at(one, 12.0)) == ["non-communication hang: rank 3 on b"]


def test_ranks_that_cannot_leave_are_named_where_most_have_left() -> None:
    one = trace("world all_reduce 4k  0.30-0.40  0.31-0.40  0.32-?  0.33-0.40")
    assert told(at(one, 12.0)) == ["communication hang: rank 2 on b"]


def test_two_that_hang_apart_are_both_named() -> None:
    one = trace("left all_reduce 4k  0.1-?  .  .  .\nright all_reduce 4k  .  .  .  0.1-?")
    assert told(at(one, 12.0)) == [
        "non-communication hang: rank 1 on a",
        "non-communication hang: rank 2 on b",
    ]


def test_whole_node_astray_is_named_as_a_node() -> None:
    one = trace("world all_reduce 4k  0.30-?  0.31-?  .  .")
    assert told(at(one, 12.0)) == ["non-communication hang: node b (ranks 2, 3)"]


def test_circle_of_messages_is_a_deadlock() -> None:
    one = trace(
        "world receive 1k <-1  0.1-?  .  .  .\nworld receive 1k <-2  .  0.1-?  .  .\nworld receive 1k <-0  .  .  0.1-?  .",
    )
    (verdict,) = at(one, 12.0)
    assert told((verdict,)) == ["mismatched collectives: group 0, 1, 2"]
    assert "0 -> 1 -> 2 -> 0" in verdict.evidence[0]


def test_posted_receive_does_not_make_a_deadlock_of_a_rank_that_went_astray() -> None:
    # Rank 1 has posted a receive, then went astray; rank 0 waits for it in `left`, and would then have sent.
    one = trace("world receive 1k <-0 async  .  0.05-?  .  .\nleft all_reduce 4k  0.45-?  .  .  .")
    assert told(at(one, 12.0)) == ["non-communication hang: rank 1 on a"]


def test_root_in_another_communicator_is_found_over_many_waits() -> None:
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
    assert told(at(parse(text + "read 20.0"), 20.0)) == [
        f"non-communication hang: rank {chain - 1} on a"
    ]


def test_uneven_gathers_are_no_mismatch() -> None:
    one = trace("world all_gather 4k  0.30-?  .  .  .\nworld all_gather 2k  .  0.31-?  .  0.33-?")
    assert told(at(one, 12.0)) == ["non-communication hang: rank 2 on b"]


def test_parting_without_majority_names_nobody() -> None:
    one = trace(
        "world all_reduce 4k  0.30-?  0.31-?  .  .\nworld broadcast 4k root=0  .  .  0.32-?  0.33-?"
    )
    (verdict,) = at(one, 12.0)
    assert told((verdict,)) == ["mismatched collectives: group 0, 1, 2, 3"]
    assert verdict.confidence < 0.7
    assert any(
        "all_reduce of 4096 bytes of float32 at rank 0, 1" in line for line in verdict.evidence
    )


def test_mismatch_that_goes_through_is_told() -> None:
    one = trace(
        "world all_reduce 4k  0.30-0.40  0.31-0.40  .  0.33-0.40\nworld all_reduce 2k  .  .  0.32-0.40  .\n"
    )
    (verdict,) = at(one, 6.5)
    assert verdict.syndrome == "mismatched collectives"
    assert 2 in verdict.subject.ranks


def test_process_that_died_without_being_needed_is_no_matter() -> None:
    one = trace()
    one.dead = {3}
    assert at(one, 60.0) == ()


def test_survivors_whose_operations_failed_bear_witness_of_a_death() -> None:
    one = trace("world all_reduce 4k failed  0.30-0.45  0.31-0.45  .  0.33-0.45")
    one.dead = {2}
    assert told(at(one, 6.6)) == ["dead process: rank 2 on b"]


def test_rank_that_lacks_at_an_earlier_operation_is_the_root_of_later_ones_too() -> None:
    # All but rank 2 have begun the barrier as well; what lacks there is what lacks at the gather before it.
    one = trace(
        "world gather 4k root=3 async  0.1-0.2  0.1-0.2  .  0.1-?\nworld barrier 0  0.3-?  0.3-?  .  0.3-?"
    )
    assert told(at(one, 12.0)) == ["non-communication hang: rank 2 on b"]


def test_gather_of_uneven_parts_that_all_have_begun_and_that_does_not_end_is_a_mismatch() -> None:
    one = trace(
        "world all_gather 4k  0.30-?  .  0.30-?  0.30-?\nworld all_gather 2k  .  0.31-?  .  ."
    )
    assert told(at(one, 12.0)) == ["mismatched collectives: group 0, 1, 2, 3"]


def test_operation_is_stuck_only_when_the_last_to_come_has_waited_long() -> None:
    one = trace("world all_reduce 4k  0.30-?  0.31-?  2.50-?  0.33-?")
    assert at(one, 10.8) == ()
    assert told(at(one, 11.0)) == ["communication hang: group 0, 1, 2, 3"]


def test_parting_in_the_first_step_is_told_without_the_patience_for_slow_starts() -> None:
    text = "node a: 0 1 2\ncommunicator world: 0 1 2\nstep 1 at 1.0\nworld all_reduce 4k  0.3-?  0.3-?  .\n"
    one = parse(text + "world all_reduce 8k  .  .  0.3-?\nread 4.0")
    assert told(at(one, 4.0)) == ["mismatched collectives: rank 2 on a"]


def test_failures_told_before_the_death_was_seen_still_bear_witness() -> None:
    one = trace("world all_reduce 4k failed  0.30-0.35  0.31-0.35  .  0.33-0.35")
    past, verdicts = diagnose(one.job(6.4), {}, NO_DIAGNOSIS_STATE, 6.4, Thresholds())
    assert verdicts == ()
    one.dead = {0, 1, 2, 3}
    # As a daemon's digests do, the next reading tells nothing of what had ended before.
    assert told(diagnose(one.job(6.9, since_s=6.4), {}, past, 6.9, Thresholds())[1]) == [
        "dead process: rank 2 on b"
    ]


def test_failure_that_was_survived_is_no_witness_of_an_end_long_after() -> None:
    one = parse("""
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
    finished, past, now_s = one.dead, NO_DIAGNOSIS_STATE, 0.5
    one.dead = set()
    while now_s <= one.read_s:
        past, verdicts = diagnose(one.job(now_s, now_s - 4.0), {}, past, now_s, Thresholds())
        now_s += 0.5
    one.dead = finished
    for later_s in (0.5, 1.0, 1.5):
        past, verdicts = diagnose(one.job(), {}, past, one.read_s + later_s, Thresholds())
        assert told(verdicts) == []


def test_rank_that_two_nodes_tell_of_once_does_not_blind_diagnosis() -> None:
    trace_ = trace(ABSENT)
    job = trace_.job(6.0)
    told_digest = digest(job.ranks.values(), job.communicators)[1]
    gone = told_digest.ranks[1:2].copy()
    gone["alive"] = False
    twice = replace(told_digest, ranks=np.concatenate([told_digest.ranks, gone]))
    nodes = {rank: one.node for rank, one in job.ranks.items()}
    past, verdicts = conclude(
        twice, job.communicators, nodes, {}, NO_DIAGNOSIS_STATE, 6.0, Thresholds()
    )
    assert (past.ranks["rank"].tolist(), past.ranks["alive"].all(), verdicts) == (
        [0, 1, 2, 3],
        True,
        (),
    )
    later = trace_.job(12.0)
    told_later = digest(later.ranks.values(), later.communicators)[1]
    _, verdicts = conclude(told_later, job.communicators, nodes, {}, past, 12.0, Thresholds())
    assert told(verdicts) == ["non-communication hang: rank 2 on b"]
