"""Tests what a series of steps remembers of its subjects."""

import numpy as np

from keepstep.monitor.diagnosis.history import NO_RANKS, NOTHING, StepSeries
from keepstep.monitor.diagnosis.thresholds import SlowThresholds

BOTH, ONE = np.array([1, 2]), np.array([1])


def after_an_absence(series: StepSeries) -> StepSeries:
    """Return a series in which subject 2 reports nothing for longer than a window."""
    for step in range(20):
        series = series.push(step, BOTH, np.array([0.1, 0.2]), 10)
        series = series.learn(np.zeros(2, bool), SlowThresholds())
    for step in range(20, 40):
        series = series.push(step, ONE, np.array([0.1]), 10)
    return series.push(40, BOTH, np.array([0.1, 0.4]), 10)


def test_past_of_a_rank_that_reports_late_is_kept() -> None:
    series = after_an_absence(NO_RANKS)
    assert series.keys.tolist() == [1, 2]
    assert np.allclose(np.exp(series.past), [0.1, 0.2])
    assert np.isnan(series.values[:-1, 1]).all()


def test_past_of_other_subjects_is_not_kept() -> None:
    assert np.isnan(after_an_absence(NOTHING).past[1])


def test_rank_without_a_past_is_not_kept() -> None:
    series = NO_RANKS
    for step in range(20):
        series = series.push(
            step, BOTH if step == 0 else ONE, np.full(2 if step == 0 else 1, 1), 10
        )
    assert series.keys.tolist() == [1]


def test_no_step_of_a_window_in_which_a_subject_deviated_is_learnt_from() -> None:
    series, thresholds = NO_RANKS, SlowThresholds()
    for step in range(20):
        series = series.push(step, BOTH, np.array([0.1, 0.2]), thresholds.window)
        series = series.learn(np.zeros(2, bool), thresholds)
    for step in range(20, 200):
        series = series.push(step, BOTH, np.array([0.1, 0.4]), thresholds.window)
        # It is found in one window of ten: the verdict flickers.
        series = series.learn(np.array([False, step % 10 == 0]), thresholds)
    assert np.allclose(np.exp(series.past), [0.1, 0.2])
