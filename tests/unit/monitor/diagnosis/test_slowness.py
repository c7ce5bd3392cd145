"""Who is slow, by how much, and when nobody is."""

from collections.abc import Callable

import numpy as np
import pytest

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, diagnose
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.records import Operation, Phase
from keepstep.monitor.verdicts import Verdict
from tests.unit.monitor.diagnosis.trace_text import Trace

Work = Callable[[int, int], float]


def job(
    steps: int,
    work_s: Work,
    ranks: int = 4,
    transfer_s: Work = lambda _rank, _step: 0.05,
    per_node: int = 2,
) -> Trace:
    """One all-reduce a step: each rank works, then waits for the last; the transfer is the same for all."""
    trace = Trace(
        {rank: "abcdefgh"[rank // per_node] for rank in range(ranks)},
        {},
        {"world": tuple(range(ranks))},
    )
    now_s = 1.0
    for step in range(1, steps + 1):
        began_s = [now_s + work_s(rank, step) for rank in range(ranks)]
        now_s = max(began_s) + transfer_s(0, step)
        for rank in range(ranks):
            trace.operation(rank, "world", Operation.ALL_REDUCE, began_s[rank], now_s, step=step)
    trace.read_s = now_s + 0.01
    return trace


def follow(trace: Trace, every_s: float = 1.0) -> list[tuple[float, tuple[Verdict, ...]]]:
    """Read every so often, and return what stood at each time."""
    past, now_s, seen = NO_DIAGNOSIS_STATE, 1.0, []
    while now_s < trace.read_s + every_s:
        at_s = min(now_s, trace.read_s)
        past, verdicts = diagnose(trace.job(at_s, at_s - 3 * every_s), {}, past, at_s, Thresholds())
        seen.append((at_s, verdicts))
        now_s += every_s
    return seen


def told(verdicts: tuple[Verdict, ...]) -> list[str]:
    return sorted(f"{one.syndrome}: {one.subject}" for one in verdicts)


def noisy(seed: int, sigma: float = 0.05) -> np.random.Generator:
    return np.random.default_rng([seed, int(sigma * 1000)])


@pytest.mark.parametrize("factor", [1.3, 2.0, 5.0])
def test_slow_rank_is_named_within_twenty_steps_with_its_cost(factor: float) -> None:
    rng = noisy(1)
    trace = job(
        50,
        lambda rank, step: (
            0.3 * rng.lognormal(0, 0.05) * (factor if rank == 2 and step > 30 else 1)
        ),
    )
    seen = follow(trace)
    first_s = next(at_s for at_s, verdicts in seen if verdicts)
    onset_s = trace.rows[2][29][1]["ended_s"]
    step_s = 0.3 * factor + 0.05
    assert 0 < first_s - onset_s <= 20 * step_s
    (verdict,) = seen[-1][1]
    assert told((verdict,)) == ["non-communication slow: rank 2 on b"]
    assert verdict.cost_s_per_step == pytest.approx(0.3 * (factor - 1), rel=0.25)
    assert verdict.since_s == pytest.approx(onset_s, abs=2 * step_s)


def test_verdict_goes_when_the_slowness_does() -> None:
    rng = noisy(2)
    seen = follow(
        job(
            60,
            lambda rank, step: (
                0.3 * rng.lognormal(0, 0.05) * (2 if rank == 2 and 10 < step < 30 else 1)
            ),
        )
    )
    assert any(verdicts for _, verdicts in seen)
    assert seen[-1][1] == ()


def test_when_all_slow_down_together_nobody_is_to_blame() -> None:
    rng = noisy(3)
    seen = follow(
        job(50, lambda _rank, step: 0.3 * rng.lognormal(0, 0.05) * (2 if step > 20 else 1))
    )
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_hiccups_of_single_ranks_are_not_slowness() -> None:
    rng = noisy(4)
    seen = follow(
        job(80, lambda rank, step: 0.3 * rng.lognormal(0, 0.05) + (0.5 if step % 4 == rank else 0))
    )
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_noise_as_large_as_the_deviation_is_no_verdict() -> None:
    rng = noisy(5, 0.6)
    seen = follow(job(200, lambda _rank, _step: 0.1 * rng.lognormal(0, 0.6)))
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_ranks_whose_speed_wanders_with_what_others_do_on_their_machines_are_not_slow() -> None:
    rng = noisy(2)
    wander = np.zeros((121, 4))
    for step in range(1, len(wander)):
        wander[step] = 0.93 * wander[step - 1] + rng.normal(0, 0.06, 4)
    seen = follow(job(120, lambda rank, step: 0.3 * rng.lognormal(wander[step][rank], 0.08)))
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_slowness_that_costs_next_to_nothing_is_not_told() -> None:
    seen = follow(
        job(
            40,
            lambda rank, _step: 0.012 if rank == 2 else 0.01,
            transfer_s=lambda _rank, _step: 0.3,
        )
    )
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_burst_within_very_short_steps_is_not_told() -> None:
    # 15 steps of 20 ms: less than half a second.
    seen = follow(
        job(
            100,
            lambda rank, step: 0.02 * (2 if rank == 2 and 50 < step <= 65 else 1),
            transfer_s=lambda _r, _s: 0.002,
        ),
        0.05,
    )
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_two_that_disagree_from_the_start_are_inconclusive() -> None:
    seen = follow(job(30, lambda rank, _step: 0.4 if rank else 0.2, ranks=2))
    (verdict,) = seen[-1][1]
    assert told((verdict,)) == ["non-communication slow: group 0, 1 on a"]
    assert verdict.confidence < 0.5


def test_of_two_the_one_that_left_its_own_past_is_named() -> None:
    seen = follow(job(50, lambda rank, step: 0.4 if rank and step > 30 else 0.2, ranks=2))
    assert told(seen[-1][1]) == ["non-communication slow: rank 1 on a"]


def test_stages_that_do_other_work_are_no_peers() -> None:
    # Ranks 6 and 7 call an operation more and work longer; compared with the others they would be slow.
    ranks = range(8)
    trace = Trace(
        {rank: "abcd"[rank // 2] for rank in ranks}, {}, {"world": tuple(ranks), "last": (6, 7)}
    )
    for step in range(1, 41):
        for rank in ranks:
            if rank >= 6:
                trace.operation(
                    rank, "last", Operation.ALL_REDUCE, step + 0.30, step + 0.31, step=step
                )
            trace.operation(
                rank,
                "world",
                Operation.ALL_REDUCE,
                step + (0.6 if rank >= 6 else 0.2),
                step + 0.7,
                step=step,
            )
    trace.read_s = 42.0
    assert told(diagnose(trace.job(), {}, NO_DIAGNOSIS_STATE, 42.0, Thresholds())[1]) == []


def test_where_many_are_slow_at_once_nobody_is_to_blame() -> None:
    rng = noisy(8)
    seen = follow(
        job(
            40,
            lambda rank, step: (
                0.3 * rng.lognormal(0, 0.05) * (1.5 if rank in (1, 3, 5) and step > 20 else 1)
            ),
            ranks=8,
        )
    )
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_rank_that_is_slow_in_six_of_ten_steps_is_not_yet_slow() -> None:
    seen = follow(job(60, lambda rank, step: 0.3 * (1.5 if rank == 2 and step % 10 < 6 else 1)))
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_ranks_without_peers_are_judged_by_their_own_past() -> None:
    # Each rank has a role of its own: rank r calls its own communicator r times more.
    trace = Trace(
        dict.fromkeys(range(4), "a"),
        {},
        {"world": (0, 1, 2, 3), **{f"own{rank}": (rank,) for rank in range(4)}},
    )
    now_s = 1.0
    for step in range(1, 51):
        arrives_s = []
        for rank in range(4):
            at_s = now_s + 0.1 * (rank + 1) * (1.6 if rank == 3 and step > 30 else 1)
            for extra in range(rank):
                trace.operation(
                    rank,
                    f"own{rank}",
                    Operation.BARRIER,
                    at_s + 0.001 * extra,
                    at_s + 0.001 * extra + 5e-4,
                    step=step,
                )
            arrives_s.append(at_s + 0.01)
        now_s = max(arrives_s) + 0.05
        for rank in range(4):
            trace.operation(rank, "world", Operation.ALL_REDUCE, arrives_s[rank], now_s, step=step)
    trace.read_s = now_s
    seen = follow(trace)
    assert told(seen[-1][1]) == ["non-communication slow: rank 3 on a"]
    assert "own past" in seen[-1][1][0].evidence[0]


def test_whole_slow_node_is_named_as_a_node() -> None:
    rng = noisy(6)
    seen = follow(
        job(
            40,
            lambda rank, step: (
                0.3 * rng.lognormal(0, 0.05) * (1.5 if rank // 2 == 2 and step > 20 else 1)
            ),
            ranks=8,
        )
    )
    assert told(seen[-1][1]) == ["non-communication slow: node c (ranks 4, 5)"]


def test_slow_rank_on_a_throttled_node_is_told_as_throttled() -> None:
    trace = job(40, lambda rank, step: 0.6 if rank == 2 and step > 20 else 0.3)
    past, verdicts = NO_DIAGNOSIS_STATE, ()
    for second in range(1, int(trace.read_s) + 2):
        metrics = {"b": NodeMetrics("b", float(second), throttled_s=0.5 * second)}
        at_s = min(float(second), trace.read_s)
        past, verdicts = diagnose(trace.job(at_s, at_s - 3.0), metrics, past, at_s, Thresholds())
    assert told(verdicts) == ["throttled processor: rank 2 on b"]
    assert "cpu.stat" in verdicts[0].evidence[0]


def test_transfers_of_all_slowing_down_is_the_jobs_network() -> None:
    seen = follow(
        job(60, lambda _rank, _step: 0.2, transfer_s=lambda _rank, step: 0.4 if step > 30 else 0.05)
    )
    assert told(seen[-1][1]) == ["communication slow: the whole job"]


def test_one_of_many_communicators_with_slow_transfers_is_told_as_a_group() -> None:
    trace = Trace(
        {rank: "abcdefgh"[rank // 2] for rank in range(8)},
        {},
        {f"row{row}": (row, row + 4) for row in range(4)},
    )
    for step in range(1, 31):
        for rank in range(8):
            took_s = 0.30 if rank % 4 == 2 else 0.1
            trace.operation(
                rank,
                f"row{rank % 4}",
                Operation.ALL_REDUCE,
                step + 0.2,
                step + 0.2 + took_s,
                step=step,
            )
            # Own time is equal: the others work on after the shorter transfer.
            trace.operation(
                rank,
                f"row{rank % 4}",
                Operation.BARRIER,
                step + 0.7 + took_s - 0.1,
                step + 0.91,
                0,
                step,
            )
    trace.read_s = 32.0
    _, verdicts = diagnose(trace.job(), {}, NO_DIAGNOSIS_STATE, 32.0, Thresholds())
    assert told(verdicts) == ["communication slow: group 2, 6"]


def test_checkpoint_of_one_rank_alone_is_no_stall() -> None:
    trace = job(40, lambda _rank, _step: 0.3)
    for step in range(10, 40, 10):
        row = trace.rows[0][step - 1][1]
        trace.phase(
            0,
            Phase.CHECKPOINT,
            float(row["enqueued_s"]) - 0.2,
            float(row["enqueued_s"]) - 0.1,
            step,
        )
    assert [verdicts for _, verdicts in follow(trace) if verdicts] == []


def test_checkpoints_of_one_rank_alone_do_not_hide_a_stall_in_those_of_all() -> None:
    trace = job(140, lambda _rank, _step: 0.3)
    for step in range(5, 140):
        for rank in range(4):
            ended_s = float(trace.rows[rank][step - 1][1]["enqueued_s"]) - 0.1
            if step % 20 == 0:
                trace.phase(
                    rank, Phase.CHECKPOINT, ended_s - (0.8 if rank == 2 else 0.02), ended_s, step
                )
            elif rank == 0:
                trace.phase(rank, Phase.CHECKPOINT, ended_s - 0.01, ended_s, step)
    seen = [told(verdicts) for _, verdicts in follow(trace)]
    assert ["checkpoint stall: rank 2 on b"] in seen


def test_checkpoint_stall_is_over_when_the_job_saves_no_more() -> None:
    trace = job(80, lambda _rank, _step: 0.3)
    for step in (10, 15, 20):
        for rank in range(4):
            ended_s = float(trace.rows[rank][step - 1][1]["enqueued_s"]) - 0.1
            trace.phase(
                rank, Phase.CHECKPOINT, ended_s - (0.19 if rank == 2 else 0.02), ended_s, step
            )
    seen = [told(verdicts) for _, verdicts in follow(trace)]
    assert ["checkpoint stall: rank 2 on b"] in seen
    assert seen[-1] == []


def test_transfers_that_grow_with_own_times_are_busy_machines_and_not_the_network() -> None:
    seen = follow(
        job(
            60,
            lambda _rank, step: 0.4 if step > 30 else 0.2,
            transfer_s=lambda _rank, step: 0.4 if step > 30 else 0.05,
        )
    )
    assert [verdicts for _, verdicts in seen if verdicts] == []


def test_slow_rank_that_slows_its_communicators_transfers_is_named_alone() -> None:
    trace = Trace(
        {rank: "abcdefgh"[rank // 2] for rank in range(8)},
        {},
        {f"row{row}": (row, row + 4) for row in range(4)},
    )
    for step in range(1, 31):
        for rank in range(8):
            slow = rank % 4 == 2
            began_s = step + (0.5 if rank == 2 else 0.2)
            ended_s = step + (0.8 if slow else 0.3)
            trace.operation(
                rank, f"row{rank % 4}", Operation.ALL_REDUCE, began_s, ended_s, step=step
            )
            trace.operation(
                rank, f"row{rank % 4}", Operation.BARRIER, ended_s + 0.1, step + 0.95, 0, step
            )
    trace.read_s = 32.0
    _, verdicts = diagnose(trace.job(), {}, NO_DIAGNOSIS_STATE, 32.0, Thresholds())
    assert told(verdicts) == ["non-communication slow: rank 2 on b"]


@pytest.mark.parametrize("seed", range(3))
def test_noisy_link_is_named_where_collectives_have_slowed_down_with_it(seed: int) -> None:
    rng, ranks = noisy(seed, 0.8), range(4)
    trace = Trace(
        {rank: "abcd"[rank] for rank in ranks}, {}, {"world": tuple(ranks), "pipe": tuple(ranks)}
    )
    now_s = 1.0
    for step in range(1, 46):
        is_slow = step > 30
        for sender, receiver in [(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)]:
            now_s += 0.01
            took_s = (
                0.001
                * rng.lognormal(0, 0.8)
                * (20 if is_slow and (sender, receiver) == (1, 2) else 1)
            )
            trace.operation(
                sender, "pipe", Operation.SEND, now_s, now_s + took_s, step=step, peer=receiver
            )
            trace.operation(
                receiver, "pipe", Operation.RECEIVE, now_s, now_s + took_s, step=step, peer=sender
            )
            now_s += took_s
        now_s += 0.05
        took_s = 0.06 if is_slow else 0.002
        for rank in ranks:
            trace.operation(rank, "world", Operation.ALL_REDUCE, now_s, now_s + took_s, step=step)
        now_s += took_s
    trace.read_s = now_s + 0.01
    seen = [told(verdicts) for _, verdicts in follow(trace, 0.5) if verdicts]
    assert seen
    assert all(one == ["communication slow: link 1 -> 2"] for one in seen)
