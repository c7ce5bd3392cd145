"""Tests verdicts on losses, gradient norms and checksums over steps."""

import numpy as np

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
