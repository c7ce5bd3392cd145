"""Computes how often to take a snapshot and to store a checkpoint, from costs and failures. Pure.

With a cost of w seconds each time, and failures M seconds apart on average, an interval of T loses
w/T of the time to the cost and T/2 to each failure. The best T is about sqrt(2 w M) (Young, CACM
1974); Daly's expansion (Future Generation Computer Systems 22, 2006, equation 37) also holds for
costs that are not small against M.

The failure rate is unknown when a job begins. It starts from published rates and moves to what this
job observes: with a gamma prior of one failure in `PRIOR_NODE_S` of node time, the rate's mean is
(1 + failures) / (PRIOR_NODE_S + node time).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from keepstep.elastic.rendezvous.records import Recovery
from keepstep.elastic.rendezvous.view import View

AUTO = 0
"""A value in place of a number of steps: choose."""

PRIOR_NODE_S = 250 * 86400.0
"""Node time with one failure: 4 in 1000 node-days, amid 2.3 to 6.5 (Meta, arXiv 2410.21680)."""


def failures_per_s(recoveries: Sequence[Recovery], nodes: int, wall_s: float) -> float:
    """Return the job's failure rate, in failures a second.

    Args:
        recoveries: changes of generation, oldest first; the observed time begins with the first.
        nodes: the number that takes part now, taken as constant over the whole time.
        wall_s: now, in wall-clock seconds.
    """
    since_s = recoveries[0].detected_at_s if recoveries else wall_s
    # The change that began the observed time is not part of it.
    failures = sum(recovery.after_failure for recovery in recoveries[1:])
    return (1 + failures) * nodes / (PRIOR_NODE_S + nodes * max(0.0, wall_s - since_s))


def best_interval_s(cost_s: float, rate_per_s: float) -> float:
    """Return the best interval between two beginnings, in seconds.

    Args:
        cost_s: the cost of each to the training.
        rate_per_s: failures a second.
    """
    apart_s = 1.0 / rate_per_s
    if cost_s >= 2 * apart_s:
        return apart_s + cost_s
    ratio = cost_s / (2 * apart_s)
    # Daly counts the interval without the cost.
    return math.sqrt(2 * cost_s * apart_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def snapshot_every(cost_s: float, step_s: float, rate_per_s: float) -> int:
    """Return the best number of steps between two snapshots; times in seconds."""
    return max(1, round(best_interval_s(cost_s, rate_per_s) / step_s))


def checkpoint_interval_s(view: View, wall_s: float) -> float:
    """Return the best interval between two checkpoints, in seconds; 0.0 while no cost is known.

    All the seconds that storing the last checkpoint took count as its cost. It delays the training
    by much less, so this errs towards storing too seldom; snapshots in memory make up for that.
    """
    if view.checkpoint is None or view.generation is None:
        return 0.0
    rate_per_s = failures_per_s(view.history.recoveries, len(view.generation.members), wall_s)
    return best_interval_s(view.checkpoint.took_s, rate_per_s)
