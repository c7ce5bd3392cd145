"""Where a rank's time went: in operations, or in its own doing between them; and what each operation tells of its peers.

Own time is the time outside of any operation, from leaving one (or the last of several that overlap) to calling the next. A rank that is
late because it waited elsewhere, for a tensor-parallel peer or a previous stage, spent that time within an operation: its own time
is as short as its peers', so blame passes through it to the one that made it wait. It needs no clock but the rank's own.

Own time before an operation belongs to that operation's step, so a step's sum runs from the last operation of the step before
to its own last one. Where compute overlaps asynchronous operations, the waiting ranks' own time is told too short, for their compute is
hidden behind the wait; the order of ranks stays right, and differences (a verdict's cost) become upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.signatures import SYMMETRIC, signatures, size_classes
from keepstep.monitor.diagnosis.tables import COLLECTIVE, LAST_ARRIVAL, MESSAGE, STEP, TRANSFER
from keepstep.monitor.records import Communicator, Flag, Operation, Phase, joined

_PHASE_COLUMNS = {
    Phase.DATA_WAIT: "data_s",
    Phase.CHECKPOINT: "checkpoint_s",
    Phase.GARBAGE_COLLECTION: "garbage_s",
}


@dataclass(frozen=True, slots=True)
class DigestIncrements:
    """Increments for a digest (see `keepstep.monitor.diagnosis.tables`), and steps known in part only."""

    steps: np.ndarray
    partial: np.ndarray
    collectives: np.ndarray
    messages: np.ndarray
    transfers: np.ndarray
    last_arrivals: np.ndarray
    mismatches: np.ndarray


def account_operations(
    cuts: np.ndarray,
    partial: np.ndarray,
    operations: np.ndarray,
    owner: np.ndarray,
    is_open: np.ndarray,
    phases: np.ndarray,
    phase_owner: np.ndarray,
    offsets_s: np.ndarray,
    communicators: Mapping[int, Communicator],
) -> DigestIncrements:
    """Account for what arrived since the cuts, and move the cuts, in place, to the first operation still under way.

    Args:
        cuts: dtype CUT, one a rank; `cut_s` of -inf where reading begins.
        partial: dtype STEP: what earlier calls returned as `partial` for these ranks.
        operations: each once.
        owner: for each operation, the position of its rank in `cuts`.
        is_open: whether it is under way.
        phases: all phases read.
        phase_owner: as owner.
        offsets_s: of each rank, from its clock to the job's.
        communicators: for their sizes.
    """
    on_device = (operations["flags"] & Flag.DEVICE_TIMES) > 0
    arrived_s = np.where(
        on_device & (operations["started_s"] > 0), operations["started_s"], operations["enqueued_s"]
    )
    over = operations["ended_s"] > 0
    newest_s = np.full(len(cuts), -np.inf)
    np.maximum.at(newest_s, owner[over], arrived_s[over])
    first_open_s = np.full(len(cuts), np.inf)
    np.minimum.at(first_open_s, owner[is_open], arrived_s[is_open])
    following_s = np.maximum(
        cuts["cut_s"], np.minimum(newest_s, np.nextafter(first_open_s, -np.inf))
    )

    chosen = np.flatnonzero(
        over & (arrived_s > cuts["cut_s"][owner]) & (arrived_s <= following_s[owner])
    )
    chosen = chosen[np.lexsort((arrived_s[chosen], owner[chosen]))]
    chosen_owner = owner[chosen]
    operations, arrived_s = operations.take(chosen), arrived_s[chosen]
    accounted, first_s = _own_times(cuts, operations, chosen_owner, arrived_s)
    accounted["role"] = _roles(operations, communicators)
    since_s = np.where(np.isneginf(cuts["cut_s"]), first_s, cuts["cut_s"])
    spent = _phases(phases, phase_owner, since_s, following_s, operations, chosen_owner, arrived_s)
    for rows, whose in ((accounted, chosen_owner), (spent[0], spent[1])):
        rows["rank"] = cuts["rank"][whose]
        rows["ended_s"] += offsets_s[whose]
    cuts["cut_s"] = following_s

    sums = _sum_by_step(joined([partial, accounted, spent[0]]))
    at = np.searchsorted(cuts["rank"], sums["rank"])
    newest_step = np.zeros(len(cuts), np.uint32)
    np.maximum.at(newest_step, at, np.where(sums["duration_s"] > 0, sums["step"], 0))
    done = sums["step"] < newest_step[at]
    whole = done & (sums["step"] > cuts["skip_step"][at]) & (sums["step"] > 0)
    collectives = _collectives(cuts, operations, chosen_owner, arrived_s)
    messages = _messages(cuts, operations, chosen_owner, arrived_s, offsets_s)
    return DigestIncrements(
        steps=sums.compress(whole),
        partial=sums.compress(~done),
        collectives=collectives,
        messages=messages,
        transfers=np.zeros(0, TRANSFER),
        last_arrivals=np.zeros(0, LAST_ARRIVAL),
        mismatches=np.zeros(0, COLLECTIVE),
    )


def _own_times(
    cuts: np.ndarray, operations: np.ndarray, owner: np.ndarray, arrived_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return a STEP row for each operation, and when each rank's first arrived; operations are sorted by rank and arrival."""
    rows = np.zeros(len(operations), STEP)
    first_s = np.full(len(cuts), np.inf)
    if not len(operations):
        return rows, first_s
    first = np.concatenate([[True], owner[1:] != owner[:-1]])
    first_s[owner[first]] = arrived_s[first]
    afresh = np.isneginf(cuts["busy_s"])
    base_s = np.where(afresh, first_s, cuts["busy_s"])
    cuts["skip_step"][owner[first]] = np.where(
        afresh[owner[first]], operations["step"][first], cuts["skip_step"][owner[first]]
    )
    arrived = arrived_s - base_s[owner]
    ended = np.maximum(operations["ended_s"] - base_s[owner], arrived)
    # A running maximum within each rank, as one over all: ranks are set apart by more than any of them spans.
    apart = float(max(ended.max(), 0.0) - min(arrived.min(), 0.0)) + 1.0
    busy = np.maximum.accumulate(ended + owner * apart) - owner * apart
    before = np.concatenate([[0.0], busy[:-1]])
    before[first] = 0.0
    busy = np.maximum(busy, before)
    rows["step"] = operations["step"]
    rows["own_s"] = np.maximum(arrived - before, 0.0)
    rows["duration_s"] = np.maximum(busy - before, 0.0)
    rows["ended_s"] = busy + base_s[owner]
    last = np.append(first[1:], True)
    cuts["busy_s"][owner[last]] = rows["ended_s"][last]
    return rows, first_s


def _roles(operations: np.ndarray, communicators: Mapping[int, Communicator]) -> np.ndarray:
    """Return for each operation what it adds to its rank's role: a hash of what it is and of how many take part.

    Payloads are left out: with sequences of varying length, they differ between ranks of equal work.
    """
    distinct, index = np.unique(operations["communicator"], return_inverse=True)
    known = [communicators.get(int(identity)) for identity in distinct]
    sizes = np.array([len(one.ranks) if one else 0 for one in known], np.uint64)
    is_pair = np.isin(operations["code"], (Operation.SEND, Operation.RECEIVE))
    size = np.where(is_pair, np.uint64(2), sizes[index] if len(index) else np.uint64(0))
    mixed = (
        (operations["code"].astype(np.uint64) << np.uint64(32))
        + size
        + np.uint64(0x9E3779B97F4A7C15)
    )
    # The finaliser of splitmix64 (Steele, Lea and Flood, 2014): sums of its values identify multisets.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return hashed


def _phases(
    phases: np.ndarray,
    phase_owner: np.ndarray,
    since_s: np.ndarray,
    until_s: np.ndarray,
    operations: np.ndarray,
    owner: np.ndarray,
    arrived_s: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a STEP row for each phase that ended since the cut, under the step that its time was accounted to."""
    ended_s = phases["ended_s"]
    counted = (ended_s > since_s[phase_owner]) & (ended_s <= until_s[phase_owner])
    counted &= np.isin(phases["code"], tuple(_PHASE_COLUMNS))
    phases, phase_owner = phases.compress(counted), phase_owner[counted]
    rows = np.zeros(len(phases), STEP)
    rows["step"] = np.where(phases["number"] > 0, phases["number"], phases["step"])
    rows["ended_s"] = -np.inf
    took_s = phases["ended_s"] - phases["enqueued_s"]
    for phase, column in _PHASE_COLUMNS.items():
        rows[column] = np.where(phases["code"] == phase, took_s, 0.0)
    # The next operation of the same rank after the phase began: both in one order, then looked up from behind.
    times = np.concatenate([arrived_s, phases["enqueued_s"]])
    whose = np.concatenate([owner, phase_owner])
    order = np.lexsort((np.arange(len(times)), times, whose))
    is_operation = order < len(operations)
    following = np.where(is_operation, np.arange(len(order)), len(order))
    following = np.minimum.accumulate(following[::-1])[::-1][~is_operation]
    mine = order[~is_operation] - len(operations)
    has = following < len(order)
    mine, following = mine[has], order[following[has]]
    same = owner[following] == phase_owner[mine]
    rows["step"][mine[same]] = operations["step"][following[same]]
    return rows, phase_owner


def _sum_by_step(rows: np.ndarray) -> np.ndarray:
    """Make one row of all rows of a rank's step."""
    if not len(rows):
        return rows
    rows = rows.take(np.lexsort((rows["step"], rows["rank"])))
    changed = (rows["rank"][1:] != rows["rank"][:-1]) | (rows["step"][1:] != rows["step"][:-1])
    starts = np.flatnonzero(np.concatenate([[True], changed]))
    sums: np.ndarray = rows.take(starts)
    for name in ("role", "own_s", "duration_s", "data_s", "checkpoint_s", "garbage_s"):
        sums[name] = np.add.reduceat(rows[name], starts)
    sums["ended_s"] = np.maximum.reduceat(rows["ended_s"], starts)
    return sums


def _collectives(
    cuts: np.ndarray, operations: np.ndarray, owner: np.ndarray, arrived_s: np.ndarray
) -> np.ndarray:
    is_collective = ~np.isin(operations["code"], (Operation.SEND, Operation.RECEIVE))
    is_collective &= (operations["flags"] & Flag.FAILED) == 0
    operations, owner, arrived_s = (
        operations.compress(is_collective),
        owner[is_collective],
        arrived_s[is_collective],
    )
    rows = np.zeros(len(operations), COLLECTIVE)
    for name in ("communicator", "number", "step"):
        rows[name] = operations[name]
    rows["size_class"] = size_classes(operations["nbytes"])
    rows["arrived"] = 1
    symmetric = np.isin(operations["code"], SYMMETRIC)
    rows["shortest_s"] = np.where(symmetric, operations["ended_s"] - arrived_s, np.inf)
    rows["last"] = cuts["rank"][owner]
    rows["lowest"] = rows["highest"] = signatures(operations)
    rows["lowest_rank"] = rows["highest_rank"] = cuts["rank"][owner]
    return rows


def _messages(
    cuts: np.ndarray,
    operations: np.ndarray,
    owner: np.ndarray,
    arrived_s: np.ndarray,
    offsets_s: np.ndarray,
) -> np.ndarray:
    is_message = np.isin(operations["code"], (Operation.SEND, Operation.RECEIVE)) & (
        operations["peer"] >= 0
    )
    is_message &= (operations["flags"] & Flag.FAILED) == 0
    operations, owner, arrived_s = (
        operations.compress(is_message),
        owner[is_message],
        arrived_s[is_message],
    )
    rows = np.zeros(len(operations), MESSAGE)
    receives = operations["code"] == Operation.RECEIVE
    rank = cuts["rank"][owner]
    rows["sender"] = np.where(receives, operations["peer"], rank)
    rows["receiver"] = np.where(receives, rank, operations["peer"])
    for name in ("communicator", "number", "step"):
        rows[name] = operations[name]
    rows["size_class"] = size_classes(operations["nbytes"])
    rows["sides"] = np.where(receives, 2, 1)
    rows["shortest_s"] = operations["ended_s"] - arrived_s
    rows["later_s"] = arrived_s + offsets_s[owner]
    rows["received_s"] = np.where(receives, operations["ended_s"] + offsets_s[owner], -np.inf)
    return rows
