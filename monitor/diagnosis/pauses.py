"""Learns how long a job's ranks pause by themselves, by the kind of pause.

A rank pauses when it begins and ends nothing. If it goes on afterwards, the pause was no hang, and
a later one of the same kind may take as long. It records the longest pause of each kind in this
generation, over all ranks, to the precision of the readings. Waiting for other ranks is no pause:
it lasts as long as what these do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

import numpy as np

from keepstep.monitor.records import Phase


class PauseKind(StrEnum):
    """The activity of a rank that begins and ends nothing."""

    STEP = "in a step"
    """Computes, or compiles."""
    DATA = "waiting for data"
    CHECKPOINT = "in a checkpoint"
    EVALUATION = "in an evaluation"
    BETWEEN_STEPS = "between steps"


_KIND_OF_PHASE: Mapping[int, PauseKind] = {
    Phase.CHECKPOINT: PauseKind.CHECKPOINT,
    Phase.EVALUATION: PauseKind.EVALUATION,
    Phase.DATA_WAIT: PauseKind.DATA,
}


def kind_of_pause(row: np.void, *, is_in_step: bool) -> PauseKind:
    """Return what a rank does while it pauses.

    Args:
        row: of the rank, dtype RANK.
        is_in_step: whether it is in a step, as far as it marks its steps.
    """
    kind = _KIND_OF_PHASE.get(int(row["phase"]))
    if kind is not None:
        return kind
    is_between = bool(row["marks_steps"]) and not is_in_step
    return PauseKind.BETWEEN_STEPS if is_between else PauseKind.STEP


def learn_pauses(
    past: Mapping[PauseKind, float],
    before: np.ndarray,
    waiting: Collection[int],
    after: np.ndarray,
) -> dict[PauseKind, float]:
    """Return the longest pause of each kind, in seconds, after one more reading.

    Args:
        past: as returned by the last call.
        before: the ranks at the last reading, dtype RANK, ascending by rank.
        waiting: ranks that waited for others since they last moved, or were stopped.
        after: the ranks now.
    """
    _, old, new = np.intersect1d(before["rank"], after["rank"], return_indices=True)
    paused_s = before["read_at_s"][old] - before["moved_s"][old]
    has_gone_on = (after["moved_s"][new] > before["moved_s"][old]) & np.isfinite(paused_s)
    has_gone_on &= ~np.isin(before["rank"][old], list(waiting))
    longest_s = dict(past)
    kinds = _kinds(before[old])
    for index, kind in enumerate(PauseKind):
        of_kind = paused_s[has_gone_on & (kinds == index)]
        if len(of_kind):
            longest_s[kind] = max(longest_s.get(kind, 0.0), float(of_kind.max()))
    return longest_s


def unmoved_ranks(before: np.ndarray, after: np.ndarray) -> frozenset[int]:
    """Return the ranks that have begun and ended nothing from one reading to the next.

    Arguments as for `learn_pauses`.
    """
    _, old, new = np.intersect1d(before["rank"], after["rank"], return_indices=True)
    is_still = after["moved_s"][new] == before["moved_s"][old]
    return frozenset(before["rank"][old[is_still]].tolist())


def _kinds(rows: np.ndarray) -> np.ndarray:
    """Return for each rank the position of its kind of pause among all kinds."""
    position = {kind: index for index, kind in enumerate(PauseKind)}
    is_in_step = rows["in_step"] | ~rows["marks_steps"]
    kinds = np.where(is_in_step, position[PauseKind.STEP], position[PauseKind.BETWEEN_STEPS])
    for phase, kind in _KIND_OF_PHASE.items():
        kinds[rows["phase"] == phase] = position[kind]
    return kinds
