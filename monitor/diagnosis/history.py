"""Keeps the last steps of one quantity for many subjects, and finds which subjects deviate.

The quantities are times, so deviations are differences of logarithms. There are two comparisons,
and each misses something:

- with peers, now: the median of subjects that do equal work in the same step. Finds what was slow
  from the start; needs three peers.
- with its own past: each subject's value over what it used to be, compared with how all subjects'
  values have changed. Finds a change even if no other subject does equal work; misses what was slow
  from the start. If all change together, none deviates.

The past is learnt from steps in which the subject did not deviate, one window later, when that is
known. It follows slow changes, as of sequence length, at 5 % a step. A step of any window in which
the subject deviated is never learnt from: a verdict that flickers at its threshold would otherwise
teach, step by step, that slow is usual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from keepstep.monitor.diagnosis.robust import MEDIAN_TO_MEAN_ERROR, median_by, spread
from keepstep.monitor.diagnosis.thresholds import SlowThresholds

_LEARNING = 0.05
_OTHERS_SHARE = 1 / 3
_STAYING_SHARE = 0.5
"""Share of the limit above which a subject that deviated goes on to: machines that others use vary,
and a verdict that ends and begins again is read as two faults."""
_MEAN_TO_SIGMA = 1.2533
"""Standard deviation of normal values over their mean absolute deviation: sqrt(pi / 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """The last steps of one quantity.

    Args:
        keys: the subjects, int64, ascending; shape (subjects,).
        steps: step numbers; shape (steps,).
        values: logarithm of seconds, NaN where not reported; shape (steps, subjects).
        past: logarithm of what each subject used to take, NaN until learnt; shape (subjects,).
        held: how many more judgements each subject's steps are not learnt from; shape (subjects,).
        drift: mean distance of each subject's window from its past, beyond the distance that all
            have in common; NaN until learnt; shape (subjects,).
        keeps_known: whether subjects with a past are kept while they report nothing, as ranks of a
            node whose reports are late. Only for subjects whose number is bounded.
    """

    keys: np.ndarray
    steps: np.ndarray
    values: np.ndarray
    past: np.ndarray
    drift: np.ndarray
    held: np.ndarray
    keeps_known: bool = False

    def push(self, step: int, keys: np.ndarray, seconds: np.ndarray, window: int) -> StepSeries:
        """Return the series with one more step.

        Args:
            step: its number.
            keys: distinct subjects; unknown ones are added.
            seconds: value of each key.
            window: steps to keep.
        """
        keys = keys.astype(np.int64)
        if np.array_equal(keys, self.keys):
            newest = np.log(np.maximum(seconds, 1e-9))
            values = np.concatenate([self.values, newest[None]])[-window:]
            return replace(self, steps=np.append(self.steps, step)[-window:], values=values)
        all_keys = np.union1d(self.keys, keys)
        old_position = np.searchsorted(all_keys, self.keys)
        values = np.full((len(self.steps) + 1, len(all_keys)), np.nan)
        values[:-1, old_position] = self.values
        values[-1, np.searchsorted(all_keys, keys)] = np.log(np.maximum(seconds, 1e-9))
        past, drift = np.full((2, len(all_keys)), np.nan)
        past[old_position], drift[old_position] = self.past, self.drift
        held = np.zeros(len(all_keys), np.int64)
        held[old_position] = self.held
        values = values[-window:]
        # Others without a value in the window are dropped: this bounds the memory.
        is_present = ~np.isnan(values).all(axis=0) | (self.keeps_known & ~np.isnan(past))
        return replace(
            self,
            keys=all_keys[is_present],
            steps=np.append(self.steps, step)[-window:],
            values=values[:, is_present],
            past=past[is_present],
            drift=drift[is_present],
            held=held[is_present],
        )

    def learn(self, deviating: np.ndarray, thresholds: SlowThresholds) -> StepSeries:
        """Return the series with each past updated, except of subjects that deviate or did lately.

        Args:
            deviating: whether each subject deviates; shape (subjects,).
            thresholds: the number of steps to learn the past from, and of steps in a window.
        """
        held = np.where(deviating, thresholds.window, np.maximum(self.held - 1, 0))
        deviating = held > 0
        if len(self.steps) < thresholds.baseline or not len(self.keys):
            return replace(self, held=held)
        middles = _medians(self.values)
        # The oldest step: a deviation that began in newer ones is found before it is the oldest. A
        # single high step is not learnt from either.
        learnt = np.fmin(self.values[0], middles)
        fresh = np.isnan(self.past) & ~deviating
        calm = ~np.isnan(self.past) & ~np.isnan(learnt) & ~deviating
        past, drift = self.past.copy(), self.drift.copy()
        if calm.any():
            distance = np.abs(middles - past - np.median((middles - past)[calm]))
            drift[calm] += _LEARNING * (distance[calm] - drift[calm])
        past[fresh], drift[fresh] = middles[fresh], 0.0
        past[calm] += _LEARNING * (learnt[calm] - past[calm])
        return replace(self, past=past, drift=drift, held=held)

    def growth(self) -> np.ndarray:
        """Return the logarithm of each subject's value over its own past; NaN without a past."""
        growth: np.ndarray = _medians(self.values) - self.past
        return growth

    def baseline_noise(self) -> float:
        """Return the typical standard deviation of a window from its past; 0.0 if not known.

        Where processors are shared with other programs, the median of ten steps varies more than
        the noise of single steps suggests.
        """
        known = self.drift[~np.isnan(self.drift)]
        return _MEAN_TO_SIGMA * float(np.median(known)) if len(known) else 0.0


NOTHING = StepSeries(
    keys=np.zeros(0, np.int64),
    steps=np.zeros(0, np.int64),
    values=np.zeros((0, 0)),
    past=np.zeros(0),
    drift=np.zeros(0),
    held=np.zeros(0, np.int64),
)
NO_RANKS = replace(NOTHING, keeps_known=True)
"""A series without steps, whose subjects are the ranks."""


def changed_of_two(history: StepSeries, slower: int, limit: float) -> np.ndarray:
    """Return which of two subjects without other peers may have changed since their past.

    Args:
        history: of both.
        slower: position of the one that is slower than the other.
        limit: logarithm of the ratio that counts.

    Returns:
        Whether each may have, shape (2,): none, the slower one, or both, which is inconclusive.
        On a busy machine the other one's variation is small compared with the slower one's change.
    """
    growth = history.growth()
    changed = np.zeros(2, bool)
    if np.isnan(growth).any() or growth[slower] - growth[1 - slower] <= limit:
        return changed
    own, other = float(growth[slower]), float(growth[1 - slower])
    changed[slower] = True
    changed[1 - slower] = own <= limit or abs(other) >= max(limit / 2, _OTHERS_SHARE * own)
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviations:
    """How subjects deviate over the window; arrays have shape (subjects,).

    Args:
        ratio: value over the expected one, the median over the window; NaN where none is expected.
        own_ratio: value over the one expected from the subject's own past; NaN without a past.
        hot: whether the subject deviates upwards, far and long enough.
        excess_s: seconds over the expected value, the median over the window.
        from_peers: whether the expectation came from peers, or from the subject's own past.
        since: position in `steps` from which the deviation shows.
    """

    ratio: np.ndarray
    own_ratio: np.ndarray
    hot: np.ndarray
    excess_s: np.ndarray
    from_peers: np.ndarray
    since: np.ndarray


def deviations(
    history: StepSeries, groups: np.ndarray, least_ratio: float, thresholds: SlowThresholds
) -> Deviations:
    """Compare every subject with its peers, and with its own past.

    Args:
        history: of one quantity.
        groups: subjects of equal group are peers; shape (subjects,).
        least_ratio: the smallest ratio, above 1, that counts.
        thresholds: how long, and how far beyond the noise.
    """
    count = len(history.keys)
    if not count or not len(history.steps):
        empty = np.zeros(count)
        return Deviations(
            ratio=empty,
            own_ratio=empty,
            hot=empty > 0,
            excess_s=empty,
            from_peers=empty > 0,
            since=empty.astype(np.int64),
        )
    peers, has_peers = _from_peers(history.values, groups, thresholds.peers)
    changed = history.values - history.past
    is_known = ~np.isnan(changed)
    common = np.array(
        [
            np.median(row[present]) if present.sum() >= thresholds.peers else np.nan
            for row, present in zip(changed, is_known, strict=True)
        ]
    )
    own = changed - common[:, None]
    baseline_noise = history.baseline_noise()
    peers_residuals = np.where(has_peers, peers, np.nan)
    hot_by_peers, hot_by_past = (
        _find_deviating(each, least_ratio, baseline_noise, history.held > 0, thresholds)
        for each in (peers_residuals, own)
    )
    from_peers = hot_by_peers | (~hot_by_past & has_peers[-1])
    residuals = np.where(from_peers, peers, own)
    ratio = _medians(residuals)
    expected = np.exp(history.values - residuals)
    excess_s = _medians(np.exp(history.values) - expected)
    is_high = residuals > np.log(least_ratio) / 2
    # The first step after the last calm one, within the window.
    since = np.where(is_high.all(axis=0), 0, len(is_high) - np.argmin(is_high[::-1], axis=0))
    since = np.minimum(since, len(is_high) - 1)
    return Deviations(
        ratio=np.exp(ratio),
        own_ratio=np.exp(_medians(own)),
        hot=hot_by_peers | hot_by_past,
        excess_s=excess_s,
        from_peers=from_peers,
        since=since,
    )


def _from_peers(
    values: np.ndarray, groups: np.ndarray, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return logarithms over the median of the group, step by step.

    Also returns where the group has at least `least` members.
    """
    residuals = np.full(values.shape, np.nan)
    has_peers = np.zeros(values.shape, bool)
    for row, residual, row_has_peers in zip(values, residuals, has_peers, strict=True):
        reported = ~np.isnan(row)
        grouped = median_by(groups[reported], row[reported])
        residual[reported] = row[reported] - grouped.medians[grouped.index]
        row_has_peers[reported] = grouped.counts[grouped.index] >= least
    return residuals, has_peers


def _find_deviating(
    residuals: np.ndarray,
    least_ratio: float,
    baseline_noise: float,
    deviated: np.ndarray,
    thresholds: SlowThresholds,
) -> np.ndarray:
    """Return which subjects deviate upwards.

    A subject deviates if it is beyond the noise and the least ratio, in enough steps of the window;
    one that has `deviated` in the last window goes on to down to half of that.
    """
    steps = len(residuals)
    if steps < thresholds.sustained:
        return np.zeros(residuals.shape[1], bool)
    middles = _medians(residuals)
    is_reported = ~np.isnan(middles)
    if not is_reported.any():
        return np.zeros(residuals.shape[1], bool)
    centred = (residuals - middles)[:, is_reported]
    noise = spread(centred[~np.isnan(centred)])
    # The error of a window's median is noise / sqrt(steps); subjects also differ as their hardware
    # does.
    median_error = max(MEDIAN_TO_MEAN_ERROR * noise / np.sqrt(steps), baseline_noise)
    limit = max(np.log(least_ratio), thresholds.sigmas * median_error)
    # Subjects far out are left out of the spread: of six links, two slow ones would otherwise make
    # each other look usual.
    is_usual = is_reported & ~(middles > limit)
    compared = is_usual if 2 * is_usual.sum() >= is_reported.sum() else is_reported
    limit = max(limit, thresholds.sigmas * spread(middles[compared]))
    limits = np.where(deviated, _STAYING_SHARE * limit, limit)
    with np.errstate(invalid="ignore"):
        often = (residuals > limits / 2).sum(axis=0) >= thresholds.sustained
        hot: np.ndarray = (middles > limits) & often
    return hot


def _medians(table: np.ndarray) -> np.ndarray:
    """Return each column's median over values that are not NaN; NaN for a column without any."""
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
