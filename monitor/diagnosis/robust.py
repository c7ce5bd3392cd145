"""Statistics that a minority of outliers cannot move: medians and their spread, also by group.

The breakdown point of the median and of the median absolute deviation is one half: up to half of
the values may be arbitrary. Ratios to the mean lack that property: with four ranks, one must be
nine times slower to be three times slower than the mean of all. Rousseeuw and Croux, "Alternatives
to the Median Absolute Deviation" (1993), for the factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAD_TO_SIGMA = 1.4826
"""Factor from the median absolute deviation of normal values to their standard deviation."""

MEDIAN_TO_MEAN_ERROR = 1.2533
"""Standard error of the median of normal values over that of their mean: sqrt(pi / 2)."""


def spread(values: np.ndarray) -> float:
    """Estimate the standard deviation from the median absolute deviation.

    Returns 0.0 for no values.
    """
    if not len(values):
        return 0.0
    return float(MAD_TO_SIGMA * np.median(np.abs(values - np.median(values))))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Medians by group.

    Args:
        keys: the distinct keys, ascending; shape (groups,).
        index: for each value, the position of its key; shape (values,).
        counts: values in each group; shape (groups,).
        medians: of each group; shape (groups,).
    """

    keys: np.ndarray
    index: np.ndarray
    counts: np.ndarray
    medians: np.ndarray


def median_by(keys: np.ndarray, values: np.ndarray) -> Grouped:
    """Return the median of the values of every key, in n log n time.

    Args:
        keys: of any sortable dtype; shape (values,).
        values: shape (values,).
    """
    distinct, index, counts = np.unique(keys, return_inverse=True, return_counts=True)
    if not len(distinct):
        return Grouped(distinct, index, counts, np.zeros(0))
    ordered = values[np.lexsort((values, index))]
    ends = np.cumsum(counts)
    begins = ends - counts
    medians = (ordered[begins + (counts - 1) // 2] + ordered[begins + counts // 2]) / 2
    return Grouped(distinct, index, counts, medians)
