"""Tests which ranks are slow, by how much, and when none is."""

from collections.abc import Callable

import numpy as np
import pytest

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, diagnose
from keepstep.monitor.diagnosis.metrics import NodeMetrics
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.records import Operation, Phase
from keepstep.monitor.verdicts import Advice, Verdict
from tests.unit.monitor.diagnosis.trace_text import Recording, Trace

Work = Callable[[int, int], float]


def job(
    steps: int,
    work_s: Work,
    ranks: int = 4,
    transfer_s: Work = lambda _rank, _step: 0.05,
    per_node: int = 2,
) -> Trace:
    """Return a trace in which each rank works, then waits for the last one in an all-reduce."""
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
    """Read every so often, and return which verdicts held at each time."""
    past, now_s, readings, recording = NO_DIAGNOSIS_STATE, 1.0, [], Recording(trace)
    while now_s < trace.read_s + every_s:
        at_s = min(now_s, trace.read_s)
        held = recording.job(at_s, at_s - 3 * every_s)
        past, verdicts = diagnose(held, {}, past, at_s, Thresholds())
        readings.append((at_s, verdicts))
        now_s += every_s
    return readings


def summarize(verdicts: tuple[Verdict, ...]) -> list[str]:
    return sorted(f"{verdict.syndrome}: {verdict.subject}" for verdict in verdicts)


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
    readings = follow(trace)
    first_s = next(at_s for at_s, verdicts in readings if verdicts)
    onset_s = trace.rows[2][29][1]["ended_s"]
    step_s = 0.3 * factor + 0.05
    assert 0 < first_s - onset_s <= 20 * step_s
    (verdict,) = readings[-1][1]
    assert summarize((verdict,)) == ["non-communication slow: rank 2 on b"]
    assert verdict.cost_s_per_step == pytest.approx(0.3 * (factor - 1), rel=0.25)
    assert verdict.since_s == pytest.approx(onset_s, abs=2 * step_s)


def test_verdict_ends_with_the_slowness() -> None:
    rng = noisy(2)
    readings = follow(
        job(
            60,
            lambda rank, step: (
                0.3 * rng.lognormal(0, 0.05) * (2 if rank == 2 and 10 < step < 30 else 1)
            ),
        )
    )
    assert any(verdicts for _, verdicts in readings)
    assert readings[-1][1] == ()


def test_common_slowdown_of_all_ranks_names_no_rank() -> None:
    rng = noisy(3)
    readings = follow(
        job(50, lambda _rank, step: 0.3 * rng.lognormal(0, 0.05) * (2 if step > 20 else 1))
    )
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_single_delays_of_different_ranks_are_not_slowness() -> None:
    rng = noisy(4)
    readings = follow(
        job(80, lambda rank, step: 0.3 * rng.lognormal(0, 0.05) + (0.5 if step % 4 == rank else 0))
    )
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_noise_as_large_as_the_deviation_causes_no_verdict() -> None:
    rng = noisy(5, 0.6)
    readings = follow(job(200, lambda _rank, _step: 0.1 * rng.lognormal(0, 0.6)))
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_ranks_on_shared_machines_with_drifting_speed_are_not_slow() -> None:
    rng = noisy(2)
    wander = np.zeros((121, 4))
    for step in range(1, len(wander)):
        wander[step] = 0.93 * wander[step - 1] + rng.normal(0, 0.06, 4)
    readings = follow(job(120, lambda rank, step: 0.3 * rng.lognormal(wander[step][rank], 0.08)))
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_slowness_of_negligible_cost_is_not_reported() -> None:
    readings = follow(
        job(
            40,
            lambda rank, _step: 0.012 if rank == 2 else 0.01,
            transfer_s=lambda _rank, _step: 0.3,
        )
    )
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_burst_of_very_short_steps_is_not_reported() -> None:
    # 15 steps of 20 ms: less than half a second.
    readings = follow(
        job(
            100,
            lambda rank, step: 0.02 * (2 if rank == 2 and 50 < step <= 65 else 1),
            transfer_s=lambda _r, _s: 0.002,
        ),
        0.05,
    )
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_two_that_disagree_from_the_start_are_inconclusive() -> None:
    readings = follow(job(30, lambda rank, _step: 0.4 if rank else 0.2, ranks=2))
    (verdict,) = readings[-1][1]
    assert summarize((verdict,)) == ["non-communication slow: group 0, 1 on a"]
    assert verdict.confidence < 0.5


def test_rank_that_deviates_from_its_past_is_named_of_two() -> None:
    readings = follow(job(50, lambda rank, step: 0.4 if rank and step > 30 else 0.2, ranks=2))
    assert summarize(readings[-1][1]) == ["non-communication slow: rank 1 on a"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_slow_rank_is_named_for_as_long_as_it_is_slow(ranks: int, seed: int) -> None:
    """A minute later it had become the norm: its past had learnt the slow steps."""
    rng = noisy(seed, 0.08)
    trace = job(
        220,
        lambda rank, step: (
            0.2
            * rng.lognormal(0, 0.08)
            * (2 if rank == 1 and step > 40 else 1)
            # The machine is shared, and its speed wanders.
            * (1 + 0.1 * np.sin(step / 20 + rank))
        ),
        ranks=ranks,
        per_node=1,
    )
    held = [summarize(verdicts) for _, verdicts in follow(trace)]
    first = next(index for index, names in enumerate(held) if names)
    assert len(held) - first > 45
    assert {*map(tuple, held[first + 3 :])} == {("non-communication slow: rank 1 on b",)}


def test_stages_that_do_other_work_are_not_peers() -> None:
    # Ranks 6 and 7 call one more operation and work longer; compared with the others they would be
    # slow.
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
    assert summarize(diagnose(trace.job(), {}, NO_DIAGNOSIS_STATE, 42.0, Thresholds())[1]) == []


def test_many_slow_ranks_at_once_name_no_rank() -> None:
    rng = noisy(8)
    readings = follow(
        job(
            40,
            lambda rank, step: (
                0.3 * rng.lognormal(0, 0.05) * (1.5 if rank in (1, 3, 5) and step > 20 else 1)
            ),
            ranks=8,
        )
    )
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_rank_that_is_slow_in_six_of_ten_steps_is_not_yet_slow() -> None:
    readings = follow(job(60, lambda rank, step: 0.3 * (1.5 if rank == 2 and step % 10 < 6 else 1)))
    assert [verdicts for _, verdicts in readings if verdicts] == []


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
    readings = follow(trace)
    assert summarize(readings[-1][1]) == ["non-communication slow: rank 3 on a"]
    assert "own past" in readings[-1][1][0].evidence[0]


def test_rank_that_is_slow_from_the_start_is_an_imbalance_of_the_job() -> None:
    rng = noisy(7)
    readings = follow(
        job(40, lambda rank, _step: 0.3 * rng.lognormal(0, 0.05) * (1.35 if rank == 5 else 1), 8)
    )
    (verdict,) = readings[-1][1]
    assert summarize((verdict,)) == ["load imbalance: the whole job"]
    assert verdict.advice is Advice.ALERT
    assert "rank 5" in verdict.evidence[0]


def test_rank_slow_from_the_start_that_becomes_slower_is_named() -> None:
    rng = noisy(9)

    def work_s(rank: int, step: int) -> float:
        factor = 1.35 if rank == 5 else 1.0
        return 0.3 * rng.lognormal(0, 0.03) * factor * (1.6 if rank == 5 and step > 40 else 1.0)

    assert summarize(follow(job(60, work_s, 8))[-1][1]) == ["non-communication slow: rank 5 on c"]


@pytest.mark.parametrize(("moves_with_node", "expected"), [
    (True, ["non-communication slow: rank 2 on c"]),
    (False, ["load imbalance: the whole job"]),
])  # fmt: skip
def test_slowness_that_moves_with_the_node_is_the_nodes(
    moves_with_node: bool, expected: list[str]
) -> None:
    # Rank 5 on node c is slow from the start. Then the ranks change places: rank 2 gets node c.
    rng = noisy(10)

    def work_of(slow: int) -> Work:
        return lambda rank, _step: 0.3 * rng.lognormal(0, 0.03) * (1.35 if rank == slow else 1)

    first = job(40, work_of(5), 8)
    past = NO_DIAGNOSIS_STATE
    for second in range(1, int(first.read_s)):
        past, _ = diagnose(
            first.job(float(second), second - 3.0), {}, past, float(second), Thresholds()
        )
    assert past.slow_here == {"c": frozenset({5})}
    second_job = job(40, work_of(2 if moves_with_node else 5), 8)
    second_job.nodes |= {2: "c", 3: "c", 4: "b", 5: "b"}
    past, verdicts = past.renewed(), ()
    for second in range(1, int(second_job.read_s)):
        past, verdicts = diagnose(
            second_job.job(float(second), second - 3.0), {}, past, float(second), Thresholds()
        )
    assert summarize(verdicts) == expected


@pytest.mark.parametrize("first", [0, 21], ids=["from the start", "later"])
def test_slow_rank_on_a_throttled_node_is_reported_as_throttled(first: int) -> None:
    trace = job(40, lambda rank, step: 0.6 if rank == 2 and step >= first else 0.3)
    past, verdicts = NO_DIAGNOSIS_STATE, ()
    for second in range(1, int(trace.read_s) + 2):
        metrics = {
            "b": NodeMetrics(
                "b", float(second), throttled_s=0.5 * second, cgroup_cpu_s=0.5 * second
            )
        }
        at_s = min(float(second), trace.read_s)
        past, verdicts = diagnose(trace.job(at_s, at_s - 3.0), metrics, past, at_s, Thresholds())
    assert summarize(verdicts) == ["throttled processor: rank 2 on b"]
    assert "cpu.stat" in verdicts[0].evidence[0]


def test_slow_node_is_named_as_a_node() -> None:
    rng = noisy(6)
    readings = follow(
        job(
            40,
            lambda rank, step: (
                0.3 * rng.lognormal(0, 0.05) * (1.5 if rank // 2 == 2 and step > 20 else 1)
            ),
            ranks=8,
        )
    )
    assert summarize(readings[-1][1]) == ["non-communication slow: node c (ranks 4, 5)"]


def test_common_slowdown_of_all_transfers_is_attributed_to_the_job() -> None:
    readings = follow(
        job(60, lambda _rank, _step: 0.2, transfer_s=lambda _rank, step: 0.4 if step > 30 else 0.05)
    )
    assert summarize(readings[-1][1]) == ["communication slow: the whole job"]


def test_single_communicator_with_slow_transfers_is_reported_as_a_group() -> None:
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
    assert summarize(verdicts) == ["communication slow: group 2, 6"]


def test_checkpoints_of_a_single_rank_are_not_a_stall() -> None:
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


def test_checkpoints_of_a_single_rank_do_not_hide_a_stall_of_all() -> None:
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
    readings = [summarize(verdicts) for _, verdicts in follow(trace)]
    assert ["checkpoint stall: rank 2 on b"] in readings


def test_checkpoint_stall_ends_when_the_job_stops_saving() -> None:
    trace = job(80, lambda _rank, _step: 0.3)
    for step in (10, 15, 20):
        for rank in range(4):
            ended_s = float(trace.rows[rank][step - 1][1]["enqueued_s"]) - 0.1
            trace.phase(
                rank, Phase.CHECKPOINT, ended_s - (0.19 if rank == 2 else 0.02), ended_s, step
            )
    readings = [summarize(verdicts) for _, verdicts in follow(trace)]
    assert ["checkpoint stall: rank 2 on b"] in readings
    assert readings[-1] == []


def test_transfers_that_grow_with_own_times_are_not_attributed_to_the_network() -> None:
    readings = follow(
        job(
            60,
            lambda _rank, step: 0.4 if step > 30 else 0.2,
            transfer_s=lambda _rank, step: 0.4 if step > 30 else 0.05,
        )
    )
    assert [verdicts for _, verdicts in readings if verdicts] == []


def test_slow_rank_is_named_without_its_slow_communicators() -> None:
    trace = Trace(
        {rank: "abcdefgh"[rank // 2] for rank in range(8)},
        {},
        {f"row{row}": (row, row + 4) for row in range(4)},
    )
    for step in range(1, 41):
        for rank in range(8):
            slow = rank % 4 == 2 and step > 20
            began_s = step + (0.5 if rank == 2 and slow else 0.2)
            ended_s = step + (0.8 if slow else 0.3)
            trace.operation(
                rank, f"row{rank % 4}", Operation.ALL_REDUCE, began_s, ended_s, step=step
            )
            trace.operation(
                rank, f"row{rank % 4}", Operation.BARRIER, ended_s + 0.1, step + 0.95, 0, step
            )
    trace.read_s = 42.0
    assert summarize(follow(trace)[-1][1]) == ["non-communication slow: rank 2 on b"]


@pytest.mark.parametrize("seed", range(3))
def test_noisy_slow_link_is_named_if_collectives_slowed_down_with_it(seed: int) -> None:
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
    readings = [summarize(verdicts) for _, verdicts in follow(trace, 0.5) if verdicts]
    assert readings
    assert all(summary == ["communication slow: link 1 -> 2"] for summary in readings)
