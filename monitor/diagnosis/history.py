"""A few steps' worth of one figure for many subjects, and which of these deviate: from their peers, or from their own past.

Figures are times, so deviations are differences of logarithms. Two comparisons, each with its own blind spot:

- with peers, now: the median of subjects that do equal work in the same step. Sees what was slow from the start; needs three peers.
- with its own past: each subject's figure over what it used to be, compared with how everybody's has changed. Sees a change though
  nobody does equal work; is blind to what was slow from the start. If all change together, nobody deviates.

The past is learnt from steps in which the subject did not deviate, a window later, when that is known; it follows slow change, as of
sequence length, at 5 % a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keepstep.monitor.diagnosis.robust import MEDIAN_TO_MEAN_ERROR, median_by, spread
from keepstep.monitor.diagnosis.thresholds import SlowThresholds

_LEARNING = 0.05
_MEAN_TO_SIGMA = 1.2533
"""Standard deviation of normal values over their mean absolute deviation: sqrt(pi / 2)."""


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The last steps of a figure.

    Args:
        keys: the subjects, int64, ascending; shape (subjects,).
        steps: which steps; shape (steps,).
        values: logarithm of seconds, NaN where not told; shape (steps, subjects).
        past: logarithm of what each used to take, NaN until learnt; shape (subjects,).
        drift: how far each's window has been from its past, other than all have together, on average; NaN until learnt.
    """

    keys: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    past: np.ndarray
    drift: np.ndarray

    def push(self, step: int, keys: np.ndarray, seconds: np.ndarray, window: int) -> StepSeries:
        """Return the history with one more step, of at most `window`. Keys are distinct; unknown ones are added."""
        keys = keys.astype(np.int64)
        if np.array_equal(keys, self.keys):
            newest = np.log(np.maximum(seconds, 1e-9))
            values = np.concatenate([self.values, newest[None]])[-window:]
            return replace(self, steps=np.append(self.steps, step)[-window:], values=values)
        every = np.union1d(self.keys, keys)
        old = np.searchsorted(every, self.keys)
        values = np.full((len(self.steps) + 1, len(every)), np.nan)
        values[:-1, old] = self.values
        values[-1, np.searchsorted(every, keys)] = np.log(np.maximum(seconds, 1e-9))
        past, drift = np.full((2, len(every)), np.nan)
        past[old], drift[old] = self.past, self.drift
        values = values[-window:]
        # Subjects that no step of the window tells of are gone: this bounds the memory.
        alive = ~np.isnan(values).all(axis=0)
        return StepSeries(
            every[alive],
            np.append(self.steps, step)[-window:],
            values[:, alive],
            past[alive],
            drift[alive],
        )

    def learn(self, deviating: np.ndarray, thresholds: SlowThresholds) -> StepSeries:
        """Return the history with what the last step teaches of subjects that do not deviate; `deviating` has shape (subjects,)."""
        if len(self.steps) < thresholds.baseline or not len(self.keys):
            return self
        middles = _medians(self.values)
        # The oldest step: what began to deviate in the newer ones is found before it is the oldest. Nor is one high step learnt from.
        taught = np.fmin(self.values[0], middles)
        fresh = np.isnan(self.past) & ~deviating
        calm = ~np.isnan(self.past) & ~np.isnan(taught) & ~deviating
        past, drift = self.past.copy(), self.drift.copy()
        if calm.any():
            apart = np.abs(middles - past - np.median((middles - past)[calm]))
            drift[calm] += _LEARNING * (apart[calm] - drift[calm])
        past[fresh], drift[fresh] = middles[fresh], 0.0
        past[calm] += _LEARNING * (taught[calm] - past[calm])
        return StepSeries(self.keys, self.steps, self.values, past, drift)

    def baseline_noise(self) -> float:
        """Return the standard deviation of a subject's window from its past, as most subjects have shown it; 0.0 if not known.

        Where processors are shared with others, the middle of ten steps wanders further than noise of single steps tells.
        """
        known = self.drift[~np.isnan(self.drift)]
        return _MEAN_TO_SIGMA * float(np.median(known)) if len(known) else 0.0


NOTHING = StepSeries(
    np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0)), np.zeros(0), np.zeros(0)
)


@dataclass(frozen=True, slots=True)
class Deviations:
    """How subjects deviate over the window; arrays have shape (subjects,).

    Args:
        ratio: of each subject's figure to what is expected of it, the median over the window; NaN where nothing is expected.
        hot: whether it deviates upwards, enough and for long enough.
        excess_s: seconds over what is expected, the median over the window.
        from_peers: whether the expectation came from peers, else from its own past.
        since: position in `steps` from which the deviation shows.
        shift: how the median of all has changed from their own past, as a ratio; NaN if not known.
        noise: standard deviation of one step's logarithm.
    """

    ratio: np.ndarray
    hot: np.ndarray
    excess_s: np.ndarray
    from_peers: np.ndarray
    since: np.ndarray
    shift: float
    noise: float


def deviations(
    history: StepSeries, groups: np.ndarray, least_ratio: float, thresholds: SlowThresholds
) -> Deviations:
    """Compare every subject with its peers, and with its own past.

    Args:
        history: of one figure.
        groups: for each subject, what it is compared with: subjects of equal group are peers; shape (subjects,).
        least_ratio: the smallest ratio that counts, over 1.
        thresholds: how long, and how far beyond the noise.
    """
    count = len(history.keys)
    if not count or not len(history.steps):
        empty = np.zeros(count)
        return Deviations(
            empty, empty > 0, empty, empty > 0, empty.astype(np.int64), float("nan"), 0.0
        )
    peers, enough = _from_peers(history.values, groups, thresholds.peers)
    changed = history.values - history.past
    known = ~np.isnan(changed)
    common = np.array(
        [
            np.median(row[told]) if told.sum() >= thresholds.peers else np.nan
            for row, told in zip(changed, known, strict=True)
        ]
    )
    own = changed - common[:, None]
    told = common[~np.isnan(common)]
    shift = float(np.exp(np.median(told))) if len(told) else float("nan")
    baseline_noise = history.baseline_noise()
    hot_by_peers, noise = _find_deviating(
        np.where(enough, peers, np.nan), least_ratio, baseline_noise, thresholds
    )
    hot_by_past, own_noise = _find_deviating(own, least_ratio, baseline_noise, thresholds)
    from_peers = hot_by_peers | (~hot_by_past & enough[-1])
    chosen = np.where(from_peers, peers, own)
    ratio = _medians(chosen)
    expected = np.exp(history.values - chosen)
    excess_s = _medians(np.exp(history.values) - expected)
    high = chosen > np.log(least_ratio) / 2
    # The first step after the last calm one, within the window.
    since = np.where(high.all(axis=0), 0, len(high) - np.argmin(high[::-1], axis=0))
    since = np.minimum(since, len(high) - 1)
    return Deviations(
        np.exp(ratio),
        hot_by_peers | hot_by_past,
        excess_s,
        from_peers,
        since,
        shift,
        noise if noise else own_noise,
    )


def _from_peers(
    values: np.ndarray, groups: np.ndarray, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return logarithms over the median of the group, step by step, and where the group is large enough to tell."""
    residuals = np.full(values.shape, np.nan)
    enough = np.zeros(values.shape, bool)
    for row, residual, large in zip(values, residuals, enough, strict=True):
        told = ~np.isnan(row)
        grouped = median_by(groups[told], row[told])
        residual[told] = row[told] - grouped.medians[grouped.index]
        large[told] = grouped.counts[grouped.index] >= least
    return residuals, enough


def _find_deviating(
    residuals: np.ndarray, least_ratio: float, baseline_noise: float, thresholds: SlowThresholds
) -> tuple[np.ndarray, float]:
    """Return who deviates upwards, and the noise: beyond it, beyond the least ratio, and in enough steps of the window."""
    steps = len(residuals)
    if steps < thresholds.sustained:
        return np.zeros(residuals.shape[1], bool), 0.0
    middles = _medians(residuals)
    told = ~np.isnan(middles)
    if not told.any():
        return np.zeros(residuals.shape[1], bool), 0.0
    around = (residuals - middles)[:, told]
    noise = spread(around[~np.isnan(around)])
    # The middle of a window is known to noise / sqrt(steps); subjects differ among each other by what hardware differs.
    doubt = max(MEDIAN_TO_MEAN_ERROR * noise / np.sqrt(steps), baseline_noise)
    limit = max(np.log(least_ratio), thresholds.sigmas * doubt)
    # Who is far out says nothing of how the others differ: of six links, two slow ones would make each other look usual.
    usual = told & ~(middles > limit)
    among = usual if 2 * usual.sum() >= told.sum() else told
    limit = max(limit, thresholds.sigmas * spread(middles[among]))
    with np.errstate(invalid="ignore"):
        often = (residuals > limit / 2).sum(axis=0) >= thresholds.sustained
        hot: np.ndarray = (middles > limit) & often
    return hot, noise


def _medians(table: np.ndarray) -> np.ndarray:
    """Return each column's median over what is told; NaN for a column that tells nothing."""
    if not len(table):
        return np.full(table.shape[1], np.nan)
    if not np.isnan(table).any():
        plain: np.ndarray = np.median(table, axis=0)
        return plain
    # numpy sorts NaN to the end; nanmedian would go column by column.
    ordered = np.sort(table, axis=0)
    counts = (~np.isnan(table)).sum(axis=0)
    columns = np.arange(table.shape[1])
    low, high = np.maximum((counts - 1) // 2, 0), np.minimum(counts // 2, len(table) - 1)
    medians: np.ndarray = (ordered[low, columns] + ordered[high, columns]) / 2
    medians[counts == 0] = np.nan
    return medians
