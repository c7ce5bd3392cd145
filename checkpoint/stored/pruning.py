"""Decides which checkpoints a retention policy removes, and when their directories are deleted.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.stored.format import MANIFEST, StoredStep

GRACE_S = 3600.0


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The checkpoints to keep.

    These are the newest `last`, those whose step is a multiple of `every`, the `best` by a metric,
    given as (how many, "min" or "max"), and the `pinned` steps.
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
        steps: the committed checkpoints.
        retention: the policy.
        metric: the values that `best` compares; a checkpoint whose value is NaN has none.
    """
    newest_first = sorted(steps, key=lambda stored: (stored.step, stored.generation), reverse=True)
    # Of several generations of a step only the newest is kept.
    current = {stored.step: stored for stored in reversed(newest_first)}
    kept = (
        set(list({stored.step: None for stored in newest_first})[: max(1, retention.last)])
        | retention.pinned
    )
    if retention.every is not None:
        kept |= {step for step in current if step % retention.every == 0}
    if retention.best is not None and metric:
        count, direction = retention.best
        # NaN, the loss of a diverged run, would leave the others unsorted too.
        comparable = (s for s in current.values() if s in metric and not math.isnan(metric[s]))
        best_first = sorted(comparable, key=lambda s: metric[s], reverse=direction == "max")
        kept |= {stored.step for stored in best_first[:count]}
    return tuple(s for s in reversed(newest_first) if s.step not in kept or current[s.step] != s)


def find_garbage(
    names: Sequence[str], noted: Mapping[str, float], *, now: float, grace_s: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the directories without a manifest to note, and those to delete.

    Args:
        names: all objects under the URL.
        noted: when a directory was noted to have no manifest, in wall-clock seconds.
        now: wall-clock seconds.
        grace_s: how long ago a directory must have been noted to be deleted; 0 deletes all
            directories that have no manifest now.
    """
    present = set(names)
    directories = sorted({name.partition("/")[0] for name in names if "/" in name})
    uncommitted = [
        d
        for d in directories
        if StoredStep.parse(d) is not None and f"{d}/{MANIFEST}" not in present
    ]
    to_delete = tuple(
        d for d in uncommitted if grace_s <= 0 or (d in noted and now - noted[d] >= grace_s)
    )
    to_note = tuple(d for d in uncommitted if d not in noted and d not in to_delete)
    return to_note, to_delete
