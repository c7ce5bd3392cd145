"""Which checkpoints may go, and when what is left of them is deleted. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.stored.format import MANIFEST, StoredStep

GRACE_S = 3600.0


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which checkpoints to keep: the newest `last`, those of every `every` steps, the `best` by a metric, and `pinned` steps.

    `best` is (how many, "min" or "max").
    """

    last: int = 1
    every: int | None = None
    best: tuple[int, str] | None = None
    pinned: frozenset[int] = frozenset()


def checkpoints_to_remove(
    steps: Sequence[StoredStep],
    retention: RetentionPolicy,
    metric: Mapping[StoredStep, float] | None = None,
) -> tuple[StoredStep, ...]:
    """Return the checkpoints that a policy does not keep, oldest first.

    Args:
        steps: what is there.
        retention: what to keep.
        metric: the value that `best` goes by, where there is one; NaN is none.
    """
    newest_first = sorted(steps, key=lambda stored: (stored.step, stored.generation), reverse=True)
    # An older generation's attempt at a step that a newer one has stored serves nobody.
    current = {stored.step: stored for stored in reversed(newest_first)}
    kept = (
        set(list({stored.step: None for stored in newest_first})[: max(1, retention.last)])
        | retention.pinned
    )
    if retention.every is not None:
        kept |= {step for step in current if step % retention.every == 0}
    if retention.best is not None and metric:
        count, way = retention.best
        # NaN, the loss of a run that has diverged, would leave the others unsorted too.
        comparable = (s for s in current.values() if s in metric and not math.isnan(metric[s]))
        rated = sorted(comparable, key=lambda s: metric[s], reverse=way == "max")
        kept |= {stored.step for stored in rated[:count]}
    return tuple(s for s in reversed(newest_first) if s.step not in kept or current[s.step] != s)


def find_garbage(
    names: Sequence[str], noted: Mapping[str, float], *, now: float, grace_s: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the directories to note as no checkpoints, and those to delete.

    Args:
        names: all objects there.
        noted: since when a directory has been known to be none, in wall-clock seconds.
        now: the same clock.
        grace_s: how long one must have been none to be deleted; 0: whatever is none now.
    """
    present = set(names)
    directories = sorted({name.partition("/")[0] for name in names if "/" in name})
    none = [
        d
        for d in directories
        if StoredStep.parse(d) is not None and f"{d}/{MANIFEST}" not in present
    ]
    doomed = tuple(d for d in none if grace_s <= 0 or (d in noted and now - noted[d] >= grace_s))
    return tuple(d for d in none if d not in noted and d not in doomed), doomed
