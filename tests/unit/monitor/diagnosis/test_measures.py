"""Tests verdicts on losses, gradient norms and checksums over steps."""

import numpy as np
import pytest

from keepstep.monitor.diagnosis.measures import EMPTY_MEASURE_HISTORY, judge_measures
from keepstep.monitor.diagnosis.tables import MEASURE
from keepstep.monitor.diagnosis.thresholds import MeasureThresholds
from keepstep.monitor.records import Communicator, Measure
from keepstep.monitor.verdicts import Advice, Verdict

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}
WORLD = {1: Communicator(1, "world", (0, 1, 2, 3))}


def follow(
    values: list[list[float]],
    code: Measure = Measure.LOSS,
    communicator: int = 0,
    step_s: float = 10.0,
) -> list[tuple[Verdict, ...]]:
    """Return which verdicts held after each step, of one list of values per step."""
    curves, standing = EMPTY_MEASURE_HISTORY, []
    for step, step_values in enumerate(values, 1):
        rows = np.zeros(len(step_values), MEASURE)
        rows["rank"], rows["value"] = np.arange(len(step_values)), step_values
        rows["step"], rows["code"] = step, code
        rows["communicator"], rows["at_s"] = communicator, step * step_s
        now_s = (step + 1) * step_s
        curves, verdicts = judge_measures(
            curves, rows, len(values[0]), 3.0, WORLD, NODES, now_s, MeasureThresholds()
        )
        standing.append(verdicts)
    return standing


def smooth(steps: int, sigma: float = 0.02, seed: int = 1) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [
        [float((2 + 8 / step) * rng.lognormal(0, sigma)) for _ in range(4)]
        for step in range(1, steps + 1)
    ]


def test_falling_noisy_loss_has_no_spikes() -> None:
    assert not any(follow(smooth(1000, 0.1)))


def test_heavy_tailed_gradient_norms_have_no_spikes() -> None:
    rng = np.random.default_rng(2)
    norms = [[float(rng.lognormal(0, 0.5))] * 4 for _ in range(2000)]
    assert not any(follow(norms, Measure.GRADIENT_NORM))


def test_single_spike_is_observed_and_a_lasting_spike_alerts() -> None:
    curve = smooth(60)
    (single,) = follow([*curve, [20.0] * 4])[-1]
    assert (single.syndrome, single.advice) == ("loss spike", Advice.OBSERVE)
    lasting = follow([*curve, *[[20.0] * 4] * 3])
    assert lasting[-1][0].advice is Advice.ALERT
    assert lasting[-1][0].since_s == 610.0


def test_finding_is_withdrawn_some_steps_after_its_last_occurrence() -> None:
    seen = follow([*smooth(60), [20.0] * 4, *smooth(30)])
    assert seen[60]
    assert not seen[-1]


def test_finding_holds_for_a_minute_even_if_steps_are_short() -> None:
    seen = follow([[float("nan")] * 4, *[[2.0] * 4] * 70], step_s=1.0)
    assert seen[40]
    assert not seen[-1]


def test_lasting_new_level_is_accepted() -> None:
    assert not follow([*smooth(60), *[[20.0] * 4] * 200])[-1]


def test_loss_that_is_not_finite_on_all_ranks_is_attributed_to_the_job() -> None:
    (verdict,) = follow([[2.0] * 4, [float("inf")] * 4])[-1]
    assert (verdict.syndrome, verdict.subject.kind) == ("loss not finite", "job")
    (verdict,) = follow([[2.0] * 4, [2.0, 2.0, 2.0, float("nan")]])[-1]
    assert verdict.subject.ranks == (3,)


def test_replicas_are_compared_within_their_step_and_group() -> None:
    assert not any(follow([[7.0] * 4, [9.0] * 4], Measure.REPLICA_CHECKSUM, 1))
    (verdict,) = follow([[7.0] * 4, [9.0, 9.0, 9.0, 8.0]], Measure.REPLICA_CHECKSUM, 1)[-1]
    assert (verdict.syndrome, verdict.subject.ranks) == ("silent data corruption", (3,))
    assert verdict.advice is Advice.REPLACE_NODE


def test_finding_on_replicas_holds_until_they_are_compared_again_and_agree() -> None:
    silent = [list[float]() for _ in range(99)]
    good, bad = [7.0] * 4, [7.0, 7.0, 7.0, 8.0]
    seen = follow([good, bad, *silent, bad, *silent, good, *silent], Measure.REPLICA_CHECKSUM, 1)
    assert seen[0] == ()
    assert all(len(verdicts) == 1 for verdicts in seen[1:201])
    assert seen[200][0].since_s == 20.0
    assert seen[201:] == [()] * 100


def test_step_is_judged_after_the_reports_of_far_nodes() -> None:
    def rows(step: int, ranks: tuple[int, ...]) -> np.ndarray:
        measures = np.zeros(len(ranks), MEASURE)
        measures["rank"], measures["step"] = ranks, step
        measures["code"], measures["communicator"] = Measure.REPLICA_CHECKSUM, 1
        measures["value"] = [8.0 if rank == 3 else 7.0 for rank in ranks]
        return measures

    curves, named = EMPTY_MEASURE_HISTORY, []
    for step in range(1, 60):
        # Ten steps a second, and reports of ranks 2 and 3 take two seconds.
        measures = np.concatenate(
            [rows(step, (0, 1)), rows(step - 20, (2, 3))] if step > 20 else [rows(step, (0, 1))]
        )
        curves, verdicts = judge_measures(
            curves, measures, 4, 60.0, WORLD, NODES, step / 10, MeasureThresholds()
        )
        named.append({verdict.subject.ranks for verdict in verdicts})
    assert named[-1] == {(3,)}
    assert named[:20] == [set()] * 20


def test_loss_that_is_not_finite_is_reported_even_if_its_report_is_late() -> None:
    rows = np.zeros(2, MEASURE)
    rows["rank"], rows["step"], rows["code"] = (0, 3), (40, 20), Measure.LOSS
    rows["value"] = 2.0, float("nan")
    _, (verdict,) = judge_measures(
        EMPTY_MEASURE_HISTORY, rows, 4, 60.0, WORLD, NODES, 0.0, MeasureThresholds()
    )
    assert verdict.syndrome == "loss not finite"


def test_loss_that_is_first_reported_long_after_others_went_on_is_news() -> None:
    """As of a daemon that could not reach its parent for a while."""
    losses = [[2.0] * 3 for _ in range(200)]
    held = reported_again(Measure.LOSS, losses, [(3, 50, float("nan"))], 60.0)
    assert {syndrome for syndrome, _ in held[-1]} == {"loss not finite"}


def reported_again(
    code: Measure, values: list[list[float]], again: list[tuple[int, int, float]], late: float
) -> list[set[tuple[str, tuple[int, ...]]]]:
    """Return what held after each step, and after some measures were reported once more.

    Args:
        code: the measure.
        values: for each step, that of each rank.
        again: rank, step and value of what a restarted daemon reports.
        late: steps after which missing ranks are no longer waited for.
    """
    curves, held = EMPTY_MEASURE_HISTORY, []
    by_step = [
        [(rank, step, value) for rank, value in enumerate(step_values)]
        for step, step_values in enumerate(values, 1)
    ]
    for now_s, measures in enumerate([*by_step, again]):
        rows = np.zeros(len(measures), MEASURE)
        for row, (rank, step, value) in zip(rows, measures, strict=True):
            row["rank"], row["step"], row["value"] = rank, step, value
        rows["code"] = code
        rows["communicator"] = 1 if code is Measure.REPLICA_CHECKSUM else 0
        curves, verdicts = judge_measures(
            curves, rows, 4, late, WORLD, NODES, 60.0 * now_s, MeasureThresholds()
        )
        held.append({(str(verdict.syndrome), verdict.subject.ranks) for verdict in verdicts})
    return held


def test_loss_of_long_ago_that_a_restarted_daemon_reports_again_is_no_news() -> None:
    losses = [[2.0] * 4 for _ in range(100)]
    losses[9] = [2.0, 2.0, 2.0, float("nan")]
    held = reported_again(Measure.LOSS, losses, [(3, 10, float("nan")), (3, 100, 2.0)], 3.0)
    assert held[9] == {("loss not finite", (3,))}
    assert held[-2:] == [set(), set()]


def test_restarted_daemon_of_all_ranks_finds_no_loss_of_long_ago() -> None:
    rows = np.zeros(100, MEASURE)
    rows["rank"], rows["step"], rows["value"] = 3, np.arange(1, 101), 2.0
    rows["value"][9] = float("nan")
    _, verdicts = judge_measures(
        EMPTY_MEASURE_HISTORY, rows, 1, 3.0, WORLD, NODES, 0.0, MeasureThresholds()
    )
    assert verdicts == ()


@pytest.mark.parametrize(
    ("step", "ranks", "late"),
    [(1, range(4), 3.0), (1, range(4), 60.0), (20, range(2), 60.0)],
    ids=["of long ago", "older than the finding", "a part of those of the finding"],
)
def test_checksums_that_a_restarted_daemon_reports_again_do_not_end_a_finding(
    step: int, ranks: range, late: float
) -> None:
    good, bad = [7.0] * 4, [7.0, 7.0, 7.0, 8.0]
    sums = [good, *[list[float]()] * 18, bad, *[list[float]()] * 180]
    # The next comparison has begun: rank 0 has reported it.
    again = [*((rank, step, 7.0) for rank in ranks), (0, 200, 7.0)]
    held = reported_again(Measure.REPLICA_CHECKSUM, sums, again, late)
    assert held[-2:] == [{("silent data corruption", (3,))}] * 2
