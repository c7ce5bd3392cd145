"""Statistics that a minority of wild values cannot move: medians, their spread, by group, and median polish.

The breakdown point of the median and of the median absolute deviation is one half: up to half of the values may be anything.
Ratios to the mean lack that: with four ranks, one must be nine times slower to be three times slower than the mean of all.
Tukey, "Exploratory Data Analysis" (1977), for median polish; Rousseeuw and Croux (1993) for the factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAD_TO_SIGMA = 1.4826
"""Makes the median absolute deviation of normal values estimate their standard deviation."""

MEDIAN_TO_MEAN_ERROR = 1.2533
"""Standard error of the median of normal values over that of their mean: sqrt(pi / 2)."""


def spread(values: np.ndarray) -> float:
    """Return the standard deviation that the values' median absolute deviation tells; 0.0 for none."""
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
    """Return the median of the values of every key, in n log n. `keys` has shape (values,) and any sortable dtype."""
    distinct, index, counts = np.unique(keys, return_inverse=True, return_counts=True)
    if not len(distinct):
        return Grouped(distinct, index, counts, np.zeros(0))
    ordered = values[np.lexsort((values, index))]
    ends = np.cumsum(counts)
    begins = ends - counts
    medians = (ordered[begins + (counts - 1) // 2] + ordered[begins + counts // 2]) / 2
    return Grouped(distinct, index, counts, medians)


@dataclass(frozen=True, slots=True)
class Polished:
    """A table taken apart: cell = overall + row + column + residual. Cells without a value have a residual of NaN."""

    overall: float
    rows: np.ndarray
    columns: np.ndarray
    residuals: np.ndarray


def median_polish(table: np.ndarray, sweeps: int = 4) -> Polished:
    """Take row and column effects out of a table that may lack cells (NaN).

    Four sweeps are ample for what is asked here, which row, column or cell stands out; Tukey stops after two.

    Rows or columns with a single value cannot be told from that value's own residual, so their effect stays 0: else one slow
    link of a ring, which is all that its row and its column hold, would be read as a slow sender or receiver by mere order.
    """
    residuals = table.astype(np.float64, copy=True)
    present = ~np.isnan(residuals)
    overall = _median(residuals[present])
    residuals -= overall
    rows = np.zeros(table.shape[0])
    columns = np.zeros(table.shape[1])
    many_in_row = np.flatnonzero(present.sum(axis=1) >= 2)
    many_in_column = np.flatnonzero(present.sum(axis=0) >= 2)
    for _ in range(sweeps):
        for row in many_in_row:
            effect = _median(residuals[row][present[row]])
            rows[row] += effect
            residuals[row] -= effect
        for column in many_in_column:
            effect = _median(residuals[:, column][present[:, column]])
            columns[column] += effect
            residuals[:, column] -= effect
    return Polished(overall, rows, columns, residuals)


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else 0.0
