"""Accounts for a job's wall time: steps that were kept, and the parts of recoveries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from keepstep.monitor.contracts import RecoveryStatus

KEPT = "steps that were kept"
REDONE = "steps done again"
DETECTING = "members settling"
CONNECTING = "process groups forming"
RESTORING = "state coming back"
FIRST = "first step after"


@dataclass(frozen=True, slots=True)
class WallTimeBreakdown:
    """Seconds of wall time by use; they add up to `wall_s`."""

    wall_s: float
    parts: dict[str, float]

    @property
    def share(self) -> float:
        """The goodput: the share of steps that were kept, 0 to 1."""
        return self.parts[KEPT] / self.wall_s if self.wall_s > 0 else 0.0


def goodput(
    recoveries: Sequence[RecoveryStatus], began_at_s: float, now_s: float, step_s: float | None
) -> WallTimeBreakdown:
    """Return how the time from `began_at_s` to `now_s` was used.

    Steps that a recovery lost count as `step_s` each, because their records no longer exist. The
    first step after a recovery counts as one typical step kept, and its remaining duration as
    `FIRST`. Steps that were kept but slow are not distinguished.

    Args:
        recoveries: oldest first.
        began_at_s: wall clock at the job's beginning.
        now_s: wall clock.
        step_s: duration of a typical step; None if not known, then lost steps count as nothing.
    """
    wall_s = max(0.0, now_s - began_at_s)
    parts = dict.fromkeys((KEPT, REDONE, DETECTING, CONNECTING, RESTORING, FIRST), 0.0)
    for index, recovery in enumerate(recoveries):
        end_s = recoveries[index + 1].detected_at_s if index + 1 < len(recoveries) else now_s
        instants = (
            recovery.detected_at_s,
            recovery.opened_at_s,
            recovery.ready_at_s,
            recovery.restored_at_s,
            recovery.stepped_at_s,
        )
        # An instant that has not come (0.0) counts as now, or as the beginning of the next
        # recovery, which replaced this one.
        ordered = [began_at_s]
        for instant in instants:
            at_s = instant if instant > 0 else end_s
            ordered.append(min(max(at_s, ordered[-1]), max(end_s, ordered[-1])))
        durations = [later - earlier for earlier, later in pairwise(ordered[1:])]
        for name, seconds in zip((DETECTING, CONNECTING, RESTORING), durations[:3], strict=True):
            parts[name] += seconds
        parts[FIRST] += max(0.0, durations[3] - (step_s or 0.0))
        parts[REDONE] += recovery.lost_steps * (step_s or 0.0)
    lost_s = sum(parts.values())
    if lost_s > wall_s:
        # Overlapping recoveries were counted twice: scale their parts, and keep nothing.
        parts = {name: seconds * wall_s / lost_s for name, seconds in parts.items()}
    parts[KEPT] = max(0.0, wall_s - sum(parts.values()))
    return WallTimeBreakdown(wall_s, parts)
