"""Decides after how many steps a rank requests its next snapshot.

The interval is fixed, or chosen for the least expected loss from measured step times and costs.
"""

from __future__ import annotations

import statistics
from collections import deque

from keepstep.elastic.rendezvous.intervals import AUTO, snapshot_every

_WINDOW = 32

# Until this many snapshots and steps are measured, every step has a snapshot.
_MIN_MEASUREMENTS = 8

# A smaller change of the interval is measurement noise and is not reported.
_NOTABLE_RATIO = 1.25


class SnapshotInterval:
    """Measures the cost of snapshots and the duration of steps on this rank, in seconds.

    Args:
        every: number of steps between snapshots; `AUTO`: choose it.
        failures_per_s: rate at which failures end the job's generations.
    """

    def __init__(self, every: int, failures_per_s: float) -> None:
        self._fixed = every
        self._failures_per_s = failures_per_s
        self._costs: deque[float] = deque(maxlen=_WINDOW)
        self._step_durations: deque[float] = deque(maxlen=_WINDOW)
        self._last_step_s: float | None = None
        self._reported_every = 0

    @property
    def every(self) -> int:
        """The current number of steps between snapshots."""
        if self._fixed != AUTO:
            return self._fixed
        if min(len(self._costs), len(self._step_durations)) < _MIN_MEASUREMENTS:
            return 1
        step_s = statistics.median(self._step_durations)
        return snapshot_every(self.cost_s, step_s, self._failures_per_s)

    @property
    def cost_s(self) -> float:
        """Median time for which a snapshot blocks training; 0.0 before the first one."""
        return statistics.median(self._costs) if self._costs else 0.0

    def is_wanted(self, step: int, taken: int) -> bool:
        """Whether to take a snapshot after `step`; the last one is of step `taken` (-1: none)."""
        if self._fixed != AUTO:
            return step % self._fixed == 0
        return step - taken >= self.every

    def note_step(self, now_s: float) -> None:
        """Record the completion of a step."""
        if self._last_step_s is not None:
            self._step_durations.append(now_s - self._last_step_s)
        self._last_step_s = now_s

    def note_snapshot(self, cost_s: float) -> None:
        """Record the time for which a snapshot blocked training."""
        self._costs.append(cost_s)

    def notable_change(self) -> tuple[int, float] | None:
        """Return the chosen interval and cost, if the interval differs notably from the last one.

        The last one is what this method last returned.
        """
        every = self.every
        if self._fixed != AUTO or len(self._costs) < _MIN_MEASUREMENTS:
            return None
        if self._reported_every and not self._is_notable(every):
            return None
        self._reported_every = every
        return every, self.cost_s

    def _is_notable(self, every: int) -> bool:
        lower, upper = sorted((every, self._reported_every))
        return upper > _NOTABLE_RATIO * lower
