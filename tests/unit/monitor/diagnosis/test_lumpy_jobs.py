"""Jobs that are lumpy and healthy: nothing is done to them, and people are alerted once at most."""

import numpy as np
import pytest

from keepstep.monitor.diagnosis.conclusion import NO_DIAGNOSIS_STATE, diagnose
from keepstep.monitor.diagnosis.pauses import PauseKind
from keepstep.monitor.diagnosis.policy import ActionKind
from keepstep.monitor.diagnosis.thresholds import Thresholds
from keepstep.monitor.records import Phase
from keepstep.monitor.verdicts import Syndrome
from tests.unit.monitor.diagnosis.played_jobs import (
    FOREVER_S,
    Played,
    Seconds,
    play,
    stages,
    steps,
)


def assert_left_alone(played: Played) -> None:
    assert played.interventions == []
    assert len(played.alerts) <= 1, played.alerts


def work(step_s: float) -> Seconds:
    return lambda _rank, _step: step_s


def test_pipeline_of_long_steps_is_left_alone_in_its_first_steps() -> None:
    assert_left_alone(play(stages(8, 3.0)))


def test_first_step_of_a_job_that_counts_from_elsewhere_may_take_a_minute() -> None:
    trace = steps(6, lambda rank, step: 60.0 if (rank, step) == (1, 500) else 0.5, first_step=500)
    played = play(trace)
    assert [verdicts for _, verdicts in played.readings if verdicts] == []


def test_first_step_after_a_recovery_may_take_minutes_though_it_has_a_high_number() -> None:
    """It is read first while the state is restored, when no step has begun."""
    trace = steps(6, lambda rank, step: 200.0 if (rank, step) == (1, 500) else 0.5, first_step=500)
    state, _ = diagnose(trace.job(0.5), {}, NO_DIAGNOSIS_STATE, 0.5, Thresholds())
    for now_s in (1.2, 2.0, 60.0, 120.0, 190.0):
        state, verdicts = diagnose(trace.job(now_s), {}, state, now_s, Thresholds())
        assert verdicts == ()


@pytest.mark.parametrize("marks_steps", [True, False])
def test_slow_first_batch_of_each_epoch_is_left_alone(marks_steps: bool) -> None:
    trace = steps(
        90,
        work(0.5),
        marks_steps=marks_steps,
        data_s=lambda rank, step: 5.5 if rank == 1 and step % 20 == 0 else 0.01,
    )
    assert_left_alone(play(trace))


def test_first_batches_that_ranks_get_at_different_times_are_left_alone() -> None:
    trace = steps(
        60,
        work(0.5),
        marks_steps=False,
        data_s=lambda rank, step: 3.0 + 5.0 * rank if step % 20 == 0 else 0.01,
    )
    assert_left_alone(play(trace))


@pytest.mark.parametrize("save_s", [90.0, 200.0, 400.0])
def test_long_saves_of_rank_0_are_left_alone(save_s: float) -> None:
    trace = steps(
        40,
        work(0.5),
        after=Phase.CHECKPOINT,
        after_s=lambda rank, step: save_s if rank == 0 and step % 15 == 0 else 0.0,
    )
    assert_left_alone(play(trace))


def test_long_saves_that_no_phase_records_are_left_alone() -> None:
    trace = steps(
        40,
        work(0.5),
        after_s=lambda rank, step: 180.0 if rank == 0 and step % 15 == 0 else 0.0,
    )
    assert_left_alone(play(trace))


@pytest.mark.parametrize("marks_steps", [True, False])
def test_recompilation_in_mid_run_is_left_alone(marks_steps: bool) -> None:
    trace = steps(
        50,
        lambda rank, step: 0.5 + (40.0 + 3.0 * rank if step in (20, 35) else 0.0),
        marks_steps=marks_steps,
    )
    assert_left_alone(play(trace, busy=lambda _rank, _now_s: True))


def test_evaluation_on_one_rank_is_left_alone() -> None:
    trace = steps(
        40,
        work(0.5),
        after=Phase.EVALUATION,
        after_s=lambda rank, step: 150.0 if rank == 0 and step % 15 == 0 else 0.0,
    )
    assert_left_alone(play(trace))


def test_uneven_pipeline_stages_are_an_imbalance() -> None:
    rng = np.random.default_rng(1)
    trace = steps(
        60, lambda rank, _step: (1.3 if rank in (4, 5) else 1.0) * 0.5 * rng.lognormal(0, 0.03),
        ranks=16,
    )  # fmt: skip
    played = play(trace)
    assert_left_alone(played)
    assert {verdict.syndrome for verdict in played.readings[-1][1]} == {Syndrome.LOAD_IMBALANCE}
    assert any("rank 4 has an own time" in line for line in played.readings[-1][1][0].evidence)


@pytest.mark.parametrize("hot_from", [1, 30])
def test_busy_expert_is_an_imbalance_whenever_it_became_busy(hot_from: int) -> None:
    rng = np.random.default_rng(2)

    def load(rank: int, step: int) -> float:
        return 1.35 if rank == 3 and step >= hot_from else 1.0

    trace = steps(
        70,
        lambda rank, step: load(rank, step) * 0.5 * rng.lognormal(0, 0.03),
        ranks=8,
        routed_nbytes=lambda rank, step: 1e6 * load(rank, step),
    )
    played = play(trace)
    assert_left_alone(played)
    assert {verdict.syndrome for verdict in played.readings[-1][1]} == {Syndrome.LOAD_IMBALANCE}


def test_variable_sequence_lengths_are_left_alone() -> None:
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(0, 0.4, (200, 8))
    trace = steps(150, lambda rank, step: 0.5 * float(lengths[step, rank]), ranks=8)
    assert_left_alone(play(trace))


def test_gradient_accumulation_without_reductions_is_left_alone() -> None:
    rng = np.random.default_rng(4)
    trace = steps(
        120,
        lambda _rank, _step: 0.5 * rng.lognormal(0, 0.05),
        reduces=lambda step: step % 8 == 0,
    )
    assert_left_alone(play(trace))


def test_slow_hardware_is_still_replaced() -> None:
    rng = np.random.default_rng(5)
    trace = steps(
        300,
        lambda rank, step: (1.5 if rank == 2 and step > 40 else 1.0) * 0.5 * rng.lognormal(0, 0.03),
    )
    played = play(trace)
    (_, action) = next(
        (at_s, action) for at_s, action in played.actions if action.kind is ActionKind.REPLACE_NODE
    )
    assert action.verdict.syndrome is Syndrome.NON_COMMUNICATION_SLOW
    assert action.subject.ranks == (2,)


def hangs_at(step_of_hang: int) -> Seconds:
    return lambda rank, step: FOREVER_S if (rank, step) == (1, step_of_hang) else 0.5


def test_hang_is_reported_in_seconds_and_acted_on_with_proof() -> None:
    trace = steps(30, hangs_at(30))
    hung_s = float(trace.rows[0][-1][1]["enqueued_s"])
    played = play(trace, until_s=hung_s + 60)
    reported_s = next(at_s for at_s, verdicts in played.readings if verdicts)
    assert reported_s - hung_s <= 4.0
    restarted_s = played.first_s(ActionKind.RESTART_WORKER)
    assert 30.0 <= restarted_s - hung_s <= 45.0
    assert len(played.interventions) == 1
    assert len(played.alerts) == 1


@pytest.mark.parametrize("save_s", [120.0, 120.23])
def test_hang_is_acted_on_as_soon_after_ranks_waited_asynchronously_for_a_save_of_rank_0(
    save_s: float,
) -> None:
    """After 120.23 s, rings are read once in the all-reduce that all have begun."""
    trace = steps(
        30,
        hangs_at(30),
        after=Phase.CHECKPOINT,
        after_s=lambda rank, step: save_s if (rank, step) == (0, 15) else 0.0,
        asynchronous=True,
    )
    hung_s = float(trace.rows[0][-1][1]["enqueued_s"])
    played = play(trace, until_s=hung_s + 60)
    assert played.state.pauses[PauseKind.STEP] < 1.0
    restarted_s = played.first_s(ActionKind.RESTART_WORKER)
    assert 30.0 <= restarted_s - hung_s <= 45.0
    assert len(played.interventions) == 1


def test_hang_of_a_stopped_process_is_alerted_at_once_and_acted_on_with_proof() -> None:
    trace = steps(30, hangs_at(30))
    hung_s = float(trace.rows[0][-1][1]["enqueued_s"])
    played = play(trace, until_s=hung_s + 60, stopped=[1])
    assert played.first_s(ActionKind.ALERT) - hung_s <= 6.0
    assert 30.0 <= played.first_s(ActionKind.RESTART_WORKER) - hung_s <= 45.0


def test_rank_that_computes_for_ever_is_alerted_and_not_restarted() -> None:
    trace = steps(30, hangs_at(30))
    played = play(trace, until_s=400.0, busy=lambda rank, _now_s: rank == 1)
    assert played.interventions == []
    assert len(played.alerts) == 1


def test_hang_is_not_acted_on_where_processes_are_not_sampled() -> None:
    played = play(steps(30, hangs_at(30)), until_s=400.0, is_sampled=False)
    assert played.interventions == []
    assert len(played.alerts) == 1


def test_rank_that_waits_for_data_for_ever_is_not_restarted() -> None:
    trace = steps(
        30,
        work(0.5),
        marks_steps=False,
        data_s=lambda rank, step: FOREVER_S if (rank, step) == (1, 30) else 0.01,
    )
    played = play(trace, until_s=1000.0)
    assert played.interventions == []
    assert len(played.alerts) == 1
    assert {verdict.syndrome for verdict in played.readings[-1][1]} == {Syndrome.DATA_STALL}
