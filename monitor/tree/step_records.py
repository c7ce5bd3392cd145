"""Selects the records of some steps, and merges what several daemons have of them. Pure.

With the records of the steps go the ends of each lane of a ring, and the first record of a step:
they show from which step on a ring holds everything, and how far its rank is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.records import Communicator, Kind
from keepstep.monitor.telemetry.record_history import RankState, is_stale, newest_of
from keepstep.monitor.tree.summary import NodeFacts, Summary

_FIRST_STAMP = 2
NO_RECORDS = Summary(incarnation="", number=0, present=(), ranks=(), communicators=(), nodes=())
"""A summary of a daemon that did not answer."""


@dataclass(frozen=True, slots=True)
class HeldSteps:
    """The steps of a rank that its ring holds.

    Args:
        first: the ring holds everything from this step on; 0 before the first.
        newest: the newest step that has begun; 0 before the first.
    """

    first: int
    newest: int


def select_steps(records: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return the records of steps `first` to `last`, and those that show what a ring holds."""
    is_selected = (records["step"] >= first) & (records["step"] <= last)
    for lane in _lanes(records):
        for part in (lane, lane[records["step"][lane] > 0]):
            if len(part):
                stamps = records["stamp"][part]
                is_selected[[part[np.argmin(stamps)], part[np.argmax(stamps)]]] = True
    selected: np.ndarray = records.compress(is_selected)
    return selected


def held_steps(selected: np.ndarray) -> HeldSteps:
    """Return which steps a ring holds, given what `select_steps` returned of it."""
    operations, marks = _lanes(selected)
    # A ring of a worker that resumed begins at a later step than the job; each step has a mark.
    first = int(min(selected["step"][marks][selected["step"][marks] > 0], default=0))
    newest = 0
    for lane in (operations, marks):
        if not len(lane):
            continue
        stamps, steps = selected["stamp"][lane], selected["step"][lane]
        if stamps.min() > _FIRST_STAMP:
            # Earlier records of this step were overwritten.
            first = max(first, int(steps[np.argmin(stamps)]) + 1)
        newest = max(newest, int(steps[np.argmax(stamps)]))
    return HeldSteps(first, newest)


def merge_steps(parts: Sequence[Summary]) -> Summary:
    """Return one summary of all ranks: of a rank that several have, the living or newest one."""
    newest = newest_of(state for part in parts for state, _ in part.ranks)
    ranks: dict[int, tuple[RankState, np.ndarray]] = {}
    for state, records in (rank for part in parts for rank in part.ranks):
        known = ranks.get(state.rank)
        if not is_stale(state, newest) and (known is None or _recency(state) > _recency(known[0])):
            ranks[state.rank] = state, records
    communicators: dict[int, Communicator] = {}
    nodes: dict[str, NodeFacts] = {}
    missing: dict[str, str] = {}
    for part in parts:
        communicators |= {group.identity: group for group in part.communicators}
        nodes |= {facts.node: facts for facts in part.nodes}
        missing |= part.missing
    return Summary(
        incarnation=parts[0].incarnation,
        number=parts[0].number,
        present=tuple(sorted(ranks)),
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        communicators=tuple(communicators.values()),
        nodes=tuple(nodes.values()),
        missing=missing,
    )


def with_missing(summary: Summary, url: str) -> Mapping[str, str]:
    """Return the daemons that a child's summary lacks, named by the URLs on the way to them."""
    return {f"{url}, {name}": reason for name, reason in summary.missing.items()}


def _recency(state: RankState) -> tuple[bool, float]:
    return state.is_alive, state.created_at_s


def _lanes(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the operations are, and where phases and measures."""
    is_operation = records["kind"] == Kind.OPERATION
    return np.flatnonzero(is_operation), np.flatnonzero(~is_operation)
