"""Where a job's wall time went: into steps that were kept, or into what. Pure."""

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
    """Seconds of wall time by what they went into; `share` is that of kept steps. The parts add up to the whole."""

    wall_s: float
    parts: dict[str, float]

    @property
    def share(self) -> float:
        """The goodput, 0 to 1."""
        return self.parts[KEPT] / self.wall_s if self.wall_s > 0 else 0.0


def goodput(
    recoveries: Sequence[RecoveryStatus], began_at_s: float, now_s: float, step_s: float | None
) -> WallTimeBreakdown:
    """WallTimeBreakdown for the time from `began_at_s` to `now_s`, wall-clock seconds.

    Steps that a recovery lost took `step_s` each, for they lie before what is still on record; with None they count as
    nothing. The first step after a recovery counts as one typical step kept, and what it took beyond that as `FIRST`.
    Not seen here: steps that were kept but slow.
    """
    wall_s = max(0.0, now_s - began_at_s)
    parts = dict.fromkeys((KEPT, REDONE, DETECTING, CONNECTING, RESTORING, FIRST), 0.0)
    for place, recovery in enumerate(recoveries):
        end_s = recoveries[place + 1].detected_at_s if place + 1 < len(recoveries) else now_s
        instants = [
            recovery.detected_at_s, recovery.opened_at_s, recovery.ready_at_s, recovery.restored_at_s,
            recovery.stepped_at_s,
        ]  # fmt: skip
        # An instant that has not come (0.0) lasts until now, or until the next recovery took this one's place.
        ordered = [began_at_s]
        for instant in instants:
            ordered.append(
                min(max(instant if instant > 0 else end_s, ordered[-1]), max(end_s, ordered[-1]))
            )
        lasted = [later - earlier for earlier, later in pairwise(ordered[1:])]
        for name, seconds in zip((DETECTING, CONNECTING, RESTORING), lasted[:3], strict=True):
            parts[name] += seconds
        parts[FIRST] += max(0.0, lasted[3] - (step_s or 0.0))
        parts[REDONE] += recovery.lost_steps * (step_s or 0.0)
    lost_s = sum(parts.values())
    if lost_s > wall_s:
        # Overlapping recoveries were counted twice: the shares are kept, and nothing was gained.
        parts = {name: seconds * wall_s / lost_s for name, seconds in parts.items()}
    parts[KEPT] = max(0.0, wall_s - sum(parts.values()))
    return WallTimeBreakdown(wall_s, parts)
