"""After how many steps a rank wants its next snapshot: as told, or as often as loses least by what it measures."""

from __future__ import annotations

import statistics
from collections import deque

from keepstep.elastic.rendezvous.intervals import AUTO, snapshot_every

_WINDOW = 32

# Until so many have been measured, every step has one.
_MIN_MEASUREMENTS = 8

# A smaller change of mind is noise, which nobody needs to hear of.
_NOTABLE_RATIO = 1.25


class SnapshotInterval:
    """Measures what snapshots cost this rank and how long its steps take. All times in seconds, on one clock.

    Args:
        every: after how many steps to take one; `AUTO`: choose.
        failures_per_s: how often something of the job fails.
    """

    def __init__(self, every: int, failures_per_s: float) -> None:
        self._fixed = every
        self._failures_per_s = failures_per_s
        self._costs: deque[float] = deque(maxlen=_WINDOW)
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._stepped_s: float | None = None
        self._reported_every = 0

    @property
    def every(self) -> int:
        """After how many steps a snapshot is wanted now."""
        if self._fixed != AUTO:
            return self._fixed
        if len(self._costs) < _MIN_MEASUREMENTS or len(self._steps) < _MIN_MEASUREMENTS:
            return 1
        return snapshot_every(self.cost_s, statistics.median(self._steps), self._failures_per_s)

    @property
    def cost_s(self) -> float:
        """What a snapshot holds the training up for; 0.0 before any was taken."""
        return statistics.median(self._costs) if self._costs else 0.0

    def is_wanted(self, step: int, taken: int) -> bool:
        """Whether to take one when `step` is complete, if the last one was of step `taken` (-1: none)."""
        if self._fixed != AUTO:
            return step % self._fixed == 0
        return step - taken >= self.every

    def note_step(self, now_s: float) -> None:
        """Note that a step is complete."""
        if self._stepped_s is not None:
            self._steps.append(now_s - self._stepped_s)
        self._stepped_s = now_s

    def note_snapshot(self, cost_s: float) -> None:
        """Note for how long a snapshot has held up the training."""
        self._costs.append(cost_s)

    def notable_change(self) -> tuple[int, float] | None:
        """Return the choice and the cost behind it, if it has changed notably since it was last returned."""
        every = self.every
        if self._fixed != AUTO or len(self._costs) < _MIN_MEASUREMENTS:
            return None
        if self._reported_every and max(every, self._reported_every) <= _NOTABLE_RATIO * min(
            every, self._reported_every
        ):
            return None
        self._reported_every = every
        return every, self.cost_s
