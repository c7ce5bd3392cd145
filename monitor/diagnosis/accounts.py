"""Divides a rank's time into operations and its own time between them, and sums both by step.

Own time is the time outside of any operation, from leaving one (or the last of several that
overlap) to calling the next. A rank that is late because it waited for another one, a
tensor-parallel peer or a previous stage, spent that time within an operation: its own time is as
short as its peers', so the rank that it waited for is blamed instead. Only the rank's own clock is
needed.

Own time before an operation belongs to that operation's step, so a step's sum runs from the last
operation of the step before to its own last one. Where compute overlaps asynchronous operations,
the own time of waiting ranks is underestimated, for their compute is hidden behind the wait; the
order of ranks stays correct, and differences (a verdict's cost) become upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.signatures import SYMMETRIC, signatures, size_classes
from keepstep.monitor.diagnosis.tables import COLLECTIVE, MESSAGE, STEP
from keepstep.monitor.records import (
    Communicator,
    Flag,
    Operation,
    Phase,
    arrival_times,
    has_code,
    joined,
)

_PHASE_COLUMNS = {
    Phase.DATA_WAIT: "data_s",
    Phase.CHECKPOINT: "checkpoint_s",
    Phase.GARBAGE_COLLECTION: "garbage_s",
}


_ROUTING = (Operation.ALL_TO_ALL, Operation.SEND, Operation.RECEIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountInputs:
    """New records of some ranks, and how far these were accounted for before.

    Args:
        cuts: dtype CUT, one per rank, ascending by rank; `cut_s` is -inf where reading begins.
        partial: dtype STEP: `partial` of the last call for these ranks.
        operations: dtype RECORD; each operation once.
        owner: for each operation, the position of its rank in `cuts`.
        is_open: for each operation, whether it has not ended.
        phases: dtype RECORD; all phases read.
        phase_owner: for each phase, the position of its rank in `cuts`.
        offsets_s: for each of `cuts`, the job's clock minus the rank's.
        communicators: of the job.
    """

    cuts: np.ndarray
    partial: np.ndarray
    operations: np.ndarray
    owner: np.ndarray
    is_open: np.ndarray
    phases: np.ndarray
    phase_owner: np.ndarray
    offsets_s: np.ndarray
    communicators: Mapping[int, Communicator]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountResult:
    """Increments for a digest (see `keepstep.monitor.diagnosis.tables`), and what to remember.

    Args:
        cuts: dtype CUT: the cuts moved to the first operation that has not ended.
        partial: dtype STEP: steps that are not complete yet.
        steps: complete steps.
        collectives: of this reading; each rank's part is a row.
        messages: of this reading; each side is a row.
    """

    cuts: np.ndarray
    partial: np.ndarray
    steps: np.ndarray
    collectives: np.ndarray
    messages: np.ndarray


@dataclass(frozen=True, slots=True)
class _Calls:
    """Operations to account for, sorted by rank and arrival.

    Args:
        operations: dtype RECORD.
        owner: for each operation, the position of its rank in the cuts.
        arrived_s: when each operation was called, or began on the device, by the rank's clock.
    """

    operations: np.ndarray
    owner: np.ndarray
    arrived_s: np.ndarray

    def select(self, chosen: np.ndarray) -> _Calls:
        return _Calls(self.operations.compress(chosen), self.owner[chosen], self.arrived_s[chosen])


@dataclass(frozen=True, slots=True)
class _OwnTimes:
    """How operations divide each rank's time.

    Args:
        rows: dtype STEP, one per operation.
        first_s: when each rank's first operation arrived; inf without operations.
        busy_s: when each rank's last operation ended.
        skip_step: the step in which reading of each rank began.
    """

    rows: np.ndarray
    first_s: np.ndarray
    busy_s: np.ndarray
    skip_step: np.ndarray


def account_operations(inputs: AccountInputs) -> AccountResult:
    """Account for the records since the cuts, up to the first operation that has not ended."""
    cuts = inputs.cuts.copy()
    arrived_s = arrival_times(inputs.operations)
    cut_s = _next_cuts(inputs, arrived_s)
    calls = _new_calls(inputs, arrived_s, cut_s)
    own = _own_times(cuts, calls)
    own.rows["role"] = _roles(calls.operations, inputs.communicators)
    own.rows["routed_nbytes"] = np.where(
        has_code(calls.operations, _ROUTING), calls.operations["nbytes"], 0
    )
    since_s = np.where(np.isneginf(cuts["cut_s"]), own.first_s, cuts["cut_s"])
    phase_rows, phase_owner = _phases(inputs, since_s, cut_s, calls)
    for rows, owner in ((own.rows, calls.owner), (phase_rows, phase_owner)):
        rows["rank"] = cuts["rank"][owner]
        rows["ended_s"] += inputs.offsets_s[owner]
    cuts["cut_s"], cuts["busy_s"], cuts["skip_step"] = cut_s, own.busy_s, own.skip_step

    sums = _sum_by_step(joined([inputs.partial, own.rows, phase_rows]))
    rank_index = np.searchsorted(cuts["rank"], sums["rank"])
    newest_step = np.zeros(len(cuts), np.uint32)
    np.maximum.at(newest_step, rank_index, np.where(sums["duration_s"] > 0, sums["step"], 0))
    is_over = sums["step"] < newest_step[rank_index]
    is_complete = is_over & (sums["step"] > cuts["skip_step"][rank_index]) & (sums["step"] > 0)
    return AccountResult(
        cuts=cuts,
        partial=sums.compress(~is_over),
        steps=sums.compress(is_complete),
        collectives=_collectives(cuts, calls),
        messages=_messages(cuts, calls, inputs.offsets_s),
    )


def _next_cuts(inputs: AccountInputs, arrived_s: np.ndarray) -> np.ndarray:
    """Return each rank's new cut: before its first open operation, at most its newest ended one."""
    cuts, owner = inputs.cuts, inputs.owner
    has_ended = inputs.operations["ended_s"] > 0
    newest_s = np.full(len(cuts), -np.inf)
    np.maximum.at(newest_s, owner[has_ended], arrived_s[has_ended])
    first_open_s = np.full(len(cuts), np.inf)
    np.minimum.at(first_open_s, owner[inputs.is_open], arrived_s[inputs.is_open])
    next_s: np.ndarray = np.maximum(
        cuts["cut_s"], np.minimum(newest_s, np.nextafter(first_open_s, -np.inf))
    )
    return next_s


def _new_calls(inputs: AccountInputs, arrived_s: np.ndarray, cut_s: np.ndarray) -> _Calls:
    """Return the ended operations between each rank's old and new cut."""
    owner = inputs.owner
    chosen = np.flatnonzero(
        (inputs.operations["ended_s"] > 0)
        & (arrived_s > inputs.cuts["cut_s"][owner])
        & (arrived_s <= cut_s[owner])
    )
    chosen = chosen[np.lexsort((arrived_s[chosen], owner[chosen]))]
    return _Calls(inputs.operations.take(chosen), owner[chosen], arrived_s[chosen])


def _own_times(cuts: np.ndarray, calls: _Calls) -> _OwnTimes:
    """Divide each rank's time into operations and own time."""
    operations, owner, arrived_s = calls.operations, calls.owner, calls.arrived_s
    rows = np.zeros(len(operations), STEP)
    first_s = np.full(len(cuts), np.inf)
    busy_s, skip_step = cuts["busy_s"].copy(), cuts["skip_step"].copy()
    if not len(operations):
        return _OwnTimes(rows, first_s, busy_s, skip_step)
    is_first = np.concatenate([[True], owner[1:] != owner[:-1]])
    first_s[owner[is_first]] = arrived_s[is_first]
    begins = np.isneginf(cuts["busy_s"])
    base_s = np.where(begins, first_s, cuts["busy_s"])
    skip_step[owner[is_first]] = np.where(
        begins[owner[is_first]], operations["step"][is_first], skip_step[owner[is_first]]
    )
    arrived = arrived_s - base_s[owner]
    ended = np.maximum(operations["ended_s"] - base_s[owner], arrived)
    # One running maximum over all ranks acts as one per rank: ranks are separated by more than the
    # time that any of them spans.
    separation = float(max(ended.max(), 0.0) - min(arrived.min(), 0.0)) + 1.0
    busy = np.maximum.accumulate(ended + owner * separation) - owner * separation
    before = np.concatenate([[0.0], busy[:-1]])
    before[is_first] = 0.0
    busy = np.maximum(busy, before)
    rows["step"] = operations["step"]
    rows["own_s"] = np.maximum(arrived - before, 0.0)
    rows["duration_s"] = np.maximum(busy - before, 0.0)
    rows["ended_s"] = busy + base_s[owner]
    is_last = np.append(is_first[1:], True)
    busy_s[owner[is_last]] = rows["ended_s"][is_last]
    return _OwnTimes(rows, first_s, busy_s, skip_step)


def _roles(operations: np.ndarray, communicators: Mapping[int, Communicator]) -> np.ndarray:
    """Return what each operation adds to its rank's role.

    This is a hash of the kind of operation and of how many ranks take part. Payloads are left out:
    with sequences of varying length, they differ between ranks of equal work.
    """
    distinct, index = np.unique(operations["communicator"], return_inverse=True)
    groups = [communicators.get(int(identity)) for identity in distinct]
    sizes = np.array([len(group.ranks) if group else 0 for group in groups], np.uint64)
    is_pair = has_code(operations, (Operation.SEND, Operation.RECEIVE))
    size = np.where(is_pair, np.uint64(2), sizes[index] if len(index) else np.uint64(0))
    hashes = (
        (operations["code"].astype(np.uint64) << np.uint64(32))
        + size
        + np.uint64(0x9E3779B97F4A7C15)
    )
    # The finaliser of splitmix64 (Steele, Lea and Flood, 2014): sums of its values identify
    # multisets, up to collisions.
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    finalized: np.ndarray = hashes ^ (hashes >> np.uint64(31))
    return finalized


def _phases(
    inputs: AccountInputs, since_s: np.ndarray, until_s: np.ndarray, calls: _Calls
) -> tuple[np.ndarray, np.ndarray]:
    """Return a STEP row for each phase that ended since the cut, and its owner.

    A phase belongs to the step of the next operation, as own time does.
    """
    ended_s = inputs.phases["ended_s"]
    chosen = (ended_s > since_s[inputs.phase_owner]) & (ended_s <= until_s[inputs.phase_owner])
    chosen &= has_code(inputs.phases, tuple(_PHASE_COLUMNS))
    phases, phase_owner = inputs.phases.compress(chosen), inputs.phase_owner[chosen]
    rows = np.zeros(len(phases), STEP)
    rows["step"] = np.where(phases["number"] > 0, phases["number"], phases["step"])
    rows["ended_s"] = -np.inf
    duration_s = phases["ended_s"] - phases["enqueued_s"]
    for phase, column in _PHASE_COLUMNS.items():
        rows[column] = np.where(phases["code"] == phase, duration_s, 0.0)
    # Sort operations and phases together; the next operation after each phase is then the minimum
    # position from behind.
    times = np.concatenate([calls.arrived_s, phases["enqueued_s"]])
    owners = np.concatenate([calls.owner, phase_owner])
    order = np.lexsort((np.arange(len(times)), times, owners))
    is_operation = order < len(calls.operations)
    following = np.where(is_operation, np.arange(len(order)), len(order))
    following = np.minimum.accumulate(following[::-1])[::-1][~is_operation]
    phase_index = order[~is_operation] - len(calls.operations)
    has_following = following < len(order)
    phase_index, following = phase_index[has_following], order[following[has_following]]
    same = calls.owner[following] == phase_owner[phase_index]
    rows["step"][phase_index[same]] = calls.operations["step"][following[same]]
    return rows, phase_owner


def _sum_by_step(rows: np.ndarray) -> np.ndarray:
    """Sum all rows of the same rank and step into one row."""
    if not len(rows):
        return rows
    rows = rows.take(np.lexsort((rows["step"], rows["rank"])))
    changed = (rows["rank"][1:] != rows["rank"][:-1]) | (rows["step"][1:] != rows["step"][:-1])
    starts = np.flatnonzero(np.concatenate([[True], changed]))
    sums: np.ndarray = rows.take(starts)
    for name in (
        "role", "own_s", "duration_s", "data_s", "checkpoint_s", "garbage_s", "routed_nbytes",
    ):  # fmt: skip
        sums[name] = np.add.reduceat(rows[name], starts)
    sums["ended_s"] = np.maximum.reduceat(rows["ended_s"], starts)
    return sums


def _collectives(cuts: np.ndarray, calls: _Calls) -> np.ndarray:
    """Return a COLLECTIVE row for each call of a collective that did not fail."""
    is_collective = ~has_code(calls.operations, (Operation.SEND, Operation.RECEIVE))
    is_collective &= (calls.operations["flags"] & Flag.FAILED) == 0
    calls = calls.select(is_collective)
    operations = calls.operations
    rows = np.zeros(len(operations), COLLECTIVE)
    for name in ("communicator", "number", "step"):
        rows[name] = operations[name]
    rows["size_class"] = size_classes(operations["nbytes"])
    rows["arrived"] = 1
    symmetric = has_code(operations, SYMMETRIC)
    rows["shortest_s"] = np.where(symmetric, operations["ended_s"] - calls.arrived_s, np.inf)
    rows["last"] = cuts["rank"][calls.owner]
    rows["lowest"] = rows["highest"] = signatures(operations)
    rows["lowest_rank"] = rows["highest_rank"] = cuts["rank"][calls.owner]
    return rows


def _messages(cuts: np.ndarray, calls: _Calls, offsets_s: np.ndarray) -> np.ndarray:
    """Return a MESSAGE row for each send and receive with a known peer that did not fail."""
    is_message = has_code(calls.operations, (Operation.SEND, Operation.RECEIVE))
    is_message &= calls.operations["peer"] >= 0
    is_message &= (calls.operations["flags"] & Flag.FAILED) == 0
    calls = calls.select(is_message)
    operations, arrived_s = calls.operations, calls.arrived_s
    rows = np.zeros(len(operations), MESSAGE)
    is_receive = operations["code"] == Operation.RECEIVE
    rank, offset_s = cuts["rank"][calls.owner], offsets_s[calls.owner]
    rows["sender"] = np.where(is_receive, operations["peer"], rank)
    rows["receiver"] = np.where(is_receive, rank, operations["peer"])
    for name in ("communicator", "number", "step"):
        rows[name] = operations[name]
    rows["size_class"] = size_classes(operations["nbytes"])
    rows["sides"] = np.where(is_receive, 2, 1)
    rows["shortest_s"] = operations["ended_s"] - arrived_s
    rows["later_s"] = arrived_s + offset_s
    rows["received_s"] = np.where(is_receive, operations["ended_s"] + offset_s, -np.inf)
    return rows
