"""Summarizes records as a digest, computed where the records are.

Readings overlap: rings are read every half second, and operations end after they were first read.
Each operation is accounted for exactly once, by its time of arrival on its own rank's clock: a
reading accounts for what arrived after the last reading's cut, up to the first operation that has
not ended, which is the next cut. Clocks of different nodes are never compared here.

An operation whose end was never recorded counts as ended once a later one of the same channel has
ended, for these end in order. It counts as forgotten once its rank is three steps further: then no
rank can be waiting for it.

A rank is in an operation, and waits there for others, from when it calls it, as it may have to
connect to them; but not while the operation is in a queue of the rank's device behind other work of
the same rank. Operations of a channel begin in order. One whose end cannot be seen is waited for by
nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from keepstep.monitor.diagnosis.accounts import AccountInputs, account_operations
from keepstep.monitor.diagnosis.signatures import signatures
from keepstep.monitor.diagnosis.tables import (
    EMPTY,
    FRONTIER,
    HISTORY,
    MEASURE,
    RANK,
    STEP,
    Digest,
    merge,
)
from keepstep.monitor.records import (
    Communicator,
    Flag,
    Kind,
    Measure,
    Operation,
    Phase,
    RankRecords,
    arrival_times,
    is_open,
    is_queued,
    is_unlaunched,
    joined,
)

FORGOTTEN_STEPS = 3
"""Steps after which an operation whose end was not recorded counts as forgotten."""

# Fields of a channel key, 63 bits in all.
_RANK_BITS, _COMMUNICATOR_BITS, _DIRECTION_BITS, _PEER_BITS = 20, 17, 2, 24

CUT = np.dtype(
    [
        ("rank", "<i4"),
        ("cut_s", "<f8"),  # arrivals up to here are accounted for
        ("busy_s", "<f8"),  # when the last of these ended
        ("skip_step", "<u4"),  # the step in which reading began: only partly known
        ("stamp", "<u8"),  # of the newest record read
        ("measured", "<u8"),  # stamp of the newest measure read
        ("moved_s", "<f8"),  # when anything last began or ended
        ("step", "<u4"),  # highest step recorded
        ("marks_steps", "?"),
        ("stepped_s", "<f8"),  # when its newest complete step ended
        ("received_s", "<f8"),  # when it last called a receive
        ("received_from", "<i4"),  # and from which rank
    ]
)


@dataclass(frozen=True, slots=True)
class DigestState:
    """State between readings; its size is bounded by the ranks and their communicators.

    Args:
        cuts: dtype CUT, how far each rank is accounted for.
        frontiers: dtype FRONTIER, the newest of each channel.
        steps: dtype STEP, partial sums of incomplete steps.
    """

    cuts: np.ndarray
    frontiers: np.ndarray
    steps: np.ndarray


EMPTY_DIGEST_STATE = DigestState(np.zeros(0, CUT), np.zeros(0, FRONTIER), np.zeros(0, STEP))


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """All records of some ranks in one array, with their owners.

    Args:
        ranks: ascending by rank.
        records: their records, one rank after the other; dtype RECORD.
        owner: for each record, the position of its rank in `ranks`.
    """

    ranks: tuple[RankRecords, ...]
    records: np.ndarray
    owner: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """Return one attribute of the ranks as an array."""
        return np.array([getattr(rank, name) for rank in self.ranks])


@dataclass(frozen=True, slots=True)
class _OperationBatch:
    """Distinct operations, sorted by channel and number.

    Args:
        operations: dtype RECORD.
        owner: for each operation, the position of its rank in the reading.
        channel: for each operation, the key of its channel; see `_channel_keys`.
    """

    operations: np.ndarray
    owner: np.ndarray
    channel: np.ndarray


def digest(
    readings: Iterable[RankRecords],
    communicators: Mapping[int, Communicator],
    memory: DigestState = EMPTY_DIGEST_STATE,
) -> tuple[DigestState, Digest]:
    """Return the state to remember, and a digest of what was recorded since the last reading.

    Ranks that are missing keep their state. A rank whose records were overwritten before they were
    read starts over.

    Args:
        readings: what the rings of some ranks hold now; may repeat what was read before.
        communicators: of the job.
        memory: the state that the last call returned.
    """
    ranks = tuple(sorted(readings, key=lambda reading: reading.rank))
    if not ranks:
        return memory, merge((), communicators)
    lengths = np.array([len(reading.records) for reading in ranks])
    records = joined([reading.records for reading in ranks])
    batch = RecordBatch(ranks, records, np.repeat(np.arange(len(ranks)), lengths))
    cuts = _cuts(batch, memory)
    newest_stamp = _newest_stamps(batch)
    batch = _unread(batch, cuts)
    records = batch.records

    is_operation = records["kind"] == Kind.OPERATION
    calls = _newest(records.compress(is_operation), batch.owner[is_operation])
    frontiers, is_unfinished = _frontiers(batch, calls, memory.frontiers)
    is_phase = records["kind"] == Kind.PHASE
    phases, phase_owner = records.compress(is_phase), batch.owner[is_phase]
    rows = _ranks(batch, calls.operations, calls.owner, phases, phase_owner, cuts)
    for name in ("marks_steps", "moved_s", "step"):
        cuts[name] = rows[name]

    continued = np.isin(memory.steps["rank"], cuts["rank"][~np.isneginf(cuts["cut_s"])])
    accounts = account_operations(
        AccountInputs(
            cuts=cuts,
            partial=memory.steps[continued],
            operations=calls.operations,
            owner=calls.owner,
            is_open=is_unfinished,
            phases=phases,
            phase_owner=phase_owner,
            offsets_s=rows["offset_s"],
            communicators=communicators,
        )
    )
    cuts = accounts.cuts
    measures = _measures(batch, cuts)
    cuts["stamp"] = np.maximum(cuts["stamp"], newest_stamp)
    other_cuts, other_frontiers, other_steps = (
        table[~np.isin(table["rank"], cuts["rank"])]
        for table in (memory.cuts, memory.frontiers, memory.steps)
    )
    next_state = DigestState(
        cuts=joined([other_cuts, cuts]),
        frontiers=joined([other_frontiers, frontiers]),
        steps=joined([other_steps, accounts.partial]),
    )
    new_digest = replace(
        EMPTY,
        ranks=rows,
        frontiers=frontiers,
        steps=accounts.steps,
        collectives=accounts.collectives,
        messages=accounts.messages,
        measures=measures,
    )
    return next_state, merge((new_digest,), communicators)


def _cuts(batch: RecordBatch, memory: DigestState) -> np.ndarray:
    """Return how far each rank is accounted for.

    -inf for ranks not read before, and for those whose records were overwritten before they were
    read.
    """
    cuts = np.zeros(len(batch.ranks), CUT)
    cuts["rank"] = batch.column("rank")
    for name in ("cut_s", "busy_s", "moved_s", "stepped_s", "received_s"):
        cuts[name] = -np.inf
    if not len(memory.cuts):
        return cuts
    rank_order = np.argsort(memory.cuts["rank"])
    known_cuts = memory.cuts[rank_order]
    at = np.minimum(np.searchsorted(known_cuts["rank"], cuts["rank"]), len(known_cuts) - 1)
    is_known = known_cuts["rank"][at] == cuts["rank"]
    cuts[is_known] = known_cuts[at[is_known]]
    # Stamps grow by two per record: if the lowest new stamp is not the next, records were
    # overwritten before they were read.
    stamps = batch.records["stamp"]
    lowest_new = np.full(len(cuts), np.iinfo(np.uint64).max, np.uint64)
    new = stamps > cuts["stamp"][batch.owner]
    np.minimum.at(lowest_new, batch.owner[new], stamps[new])
    is_lost = (
        is_known
        & (lowest_new != np.iinfo(np.uint64).max)
        & (lowest_new > cuts["stamp"] + np.uint64(2))
    )
    cuts["cut_s"][is_lost] = -np.inf
    cuts["busy_s"][is_lost] = -np.inf
    return cuts


def _newest_stamps(batch: RecordBatch) -> np.ndarray:
    """Return the highest stamp of each rank."""
    newest = np.zeros(len(batch.ranks), np.uint64)
    np.maximum.at(newest, batch.owner, batch.records["stamp"])
    return newest


def _unread(batch: RecordBatch, cuts: np.ndarray) -> RecordBatch:
    """Drop records that were accounted for and cannot change.

    These are operations and phases that ended before their rank's cut, operations whose end cannot
    be seen, and measures already reported. They are most of what a ring holds, and cost no more
    than this check.
    """
    records, owner = batch.records, batch.owner
    ended_s = records["ended_s"]
    keep = (ended_s <= 0) | (ended_s > cuts["cut_s"][owner])
    keep &= (ended_s > 0) | is_open(records) | (records["stamp"] > cuts["stamp"][owner])
    keep &= (records["kind"] != Kind.MEASURE) | (records["stamp"] > cuts["measured"][owner])
    return RecordBatch(batch.ranks, records.compress(keep), owner[keep])


def _newest(operations: np.ndarray, owner: np.ndarray) -> _OperationBatch:
    """Return each operation once, sorted by channel and number.

    Among several records of an operation, the one that ended last is kept.
    """
    channel = _channel_keys(
        owner, operations["communicator"], operations["code"], operations["peer"]
    )
    if not len(operations):
        return _OperationBatch(operations, owner, channel)
    order = np.lexsort((operations["ended_s"], operations["number"], channel))
    operations, owner, channel = operations.take(order), owner[order], channel[order]
    is_last = np.ones(len(operations), bool)
    is_last[:-1] = (channel[1:] != channel[:-1]) | (
        operations["number"][1:] != operations["number"][:-1]
    )
    return _OperationBatch(operations.compress(is_last), owner[is_last], channel[is_last])


def _channel_keys(
    rank: np.ndarray, communicator: np.ndarray, code: np.ndarray, peer: np.ndarray
) -> np.ndarray:
    """Pack channels into int64 keys that sort by rank, communicator, direction and peer.

    Operations are numbered within a channel. Keys of different calls are not comparable: of
    communicators, the position among those given is packed, not the 32-bit id.

    Args:
        rank: global rank, or position of the rank in a reading; shape (channels,), as the others.
        communicator: id.
        code: Operation.SEND or RECEIVE; any other value means a collective.
        peer: global rank of the other side; ignored for collectives.
    """
    distinct, communicator_index = np.unique(communicator, return_inverse=True)
    direction = np.where(code == Operation.SEND, 1, np.where(code == Operation.RECEIVE, 2, 0))
    peer_index = np.where(direction > 0, peer.astype(np.int64) + 1, 0)
    assert len(distinct) <= 1 << _COMMUNICATOR_BITS, f"{len(distinct)} communicators"
    assert _fits(rank, _RANK_BITS), "a rank is out of range"
    assert _fits(peer_index, _PEER_BITS), "a peer is out of range"
    keys = rank.astype(np.int64) << _COMMUNICATOR_BITS | communicator_index
    keys = keys << _DIRECTION_BITS | direction
    packed: np.ndarray = keys << _PEER_BITS | peer_index
    return packed


def _fits(values: np.ndarray, bits: int) -> bool:
    """Return whether all values are unsigned integers of at most `bits` bits."""
    return not len(values) or (values.min() >= 0 and int(values.max()) >> bits == 0)


def _frontiers(
    batch: RecordBatch, calls: _OperationBatch, remembered: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the frontier of every rank in every channel, and which operations have not ended."""
    ranks = batch.column("rank")
    operations, owner, channel = calls.operations, calls.owner, calls.channel
    is_unfinished = np.zeros(len(operations), bool)
    rows = np.zeros(0, FRONTIER)
    if len(operations):
        starts = np.flatnonzero(np.concatenate([[True], channel[1:] != channel[:-1]]))
        index = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(channel))))
        first = operations.take(starts)
        code = first["code"]
        rows = np.zeros(len(starts), FRONTIER)
        rows["rank"] = ranks[owner[starts]]
        rows["communicator"] = first["communicator"]
        rows["direction"] = np.where(
            (code == Operation.SEND) | (code == Operation.RECEIVE), code, 0
        )
        rows["peer"] = np.where(rows["direction"] > 0, first["peer"], -1)
    old = remembered.compress(np.isin(remembered["rank"], ranks))
    is_known, old_index = match_channels(rows, old)
    rows["history"][is_known] = old["history"][old_index[is_known]]
    if len(operations):
        numbers = operations["number"]
        rows["entered"] = np.maximum.reduceat(numbers, starts)
        rows["ended"] = np.maximum.reduceat(np.where(operations["ended_s"] > 0, numbers, 0), starts)
        for name in ("entered", "ended"):
            rows[name][is_known] = np.maximum(rows[name][is_known], old[name][old_index[is_known]])
        # What was called since the last reading may be lost: its slots still hold older calls.
        rows["history"][is_known] *= ~_is_called_since(
            old["entered"][old_index[is_known]], rows["entered"][is_known]
        )
        newest_step = np.zeros(len(ranks), np.int64)
        np.maximum.at(newest_step, owner, operations["step"].astype(np.int64))
        is_unfinished = is_open(operations) & (numbers > rows["ended"][index])
        is_unfinished &= operations["step"].astype(np.int64) + FORGOTTEN_STEPS > newest_step[owner]
        queued = is_queued(operations)
        has_queue = np.zeros(len(ranks), bool)
        has_queue[owner[is_unfinished & queued]] = True
        # The host may be in such a call because the queue of its device is full.
        is_behind = is_unlaunched(operations) & has_queue[owner]
        has_open, lowest = _lowest(is_unfinished & ~queued & ~is_behind, starts)
        opened = operations.take(lowest)
        rows["open"][has_open] = opened["number"]
        rows["open_nbytes"][has_open] = opened["nbytes"]
        rows["open_s"][has_open] = arrival_times(opened)
        rows["asynchronous"][has_open] = (opened["flags"] & Flag.ASYNCHRONOUS) > 0
        has_queued, lowest = _lowest(is_unfinished & queued, starts)
        rows["queued"][has_queued] = numbers[lowest]
        rows["queued_s"][has_queued] = operations["enqueued_s"][lowest]
        rows["began"] = rows["entered"]
        rows["began"][has_queued] = numbers[lowest] - np.uint64(1)
        is_recent = (numbers + np.uint64(HISTORY) > rows["entered"][index]) & (
            rows["direction"][index] == 0
        )
        slots = (numbers % np.uint64(HISTORY)).astype(np.int64)
        rows["history"][index[is_recent], slots[is_recent]] = signatures(
            operations.compress(is_recent)
        )
    # A channel without new records keeps its frontier, and has no open operation.
    is_quiet = np.ones(len(old), bool)
    is_quiet[old_index[is_known]] = False
    quiet = old[is_quiet]
    quiet["open"] = quiet["queued"] = 0
    quiet["began"] = quiet["entered"]
    return joined([rows, quiet]), is_unfinished


def _is_called_since(old_entered: np.ndarray, entered: np.ndarray) -> np.ndarray:
    """Return which slots of `history` belong to numbers above `old_entered`.

    Args:
        old_entered: highest number called before; shape (channels,).
        entered: highest number called; shape (channels,).

    Returns booleans; shape (channels, HISTORY).
    """
    newest = entered.astype(np.int64)[:, None]
    number_in_slot = newest - (newest - np.arange(HISTORY)) % HISTORY
    is_since: np.ndarray = number_in_slot > old_entered.astype(np.int64)[:, None]
    return is_since


def _lowest(chosen: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which channels have a chosen operation, and for these the position of the lowest."""
    positions = np.where(chosen, np.arange(len(chosen)), len(chosen))
    lowest = np.minimum.reduceat(positions, starts)
    has_chosen: np.ndarray = lowest < len(chosen)
    return has_chosen, lowest[has_chosen]


def match_channels(rows: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which frontiers' channels are among those of others, and for these, their position.

    Args:
        rows: dtype FRONTIER.
        others: dtype FRONTIER, each channel once.
    """
    if not len(rows) or not len(others):
        return np.zeros(len(rows), bool), np.zeros(len(rows), np.int64)
    both = joined([rows, others])
    keys = _channel_keys(both["rank"], both["communicator"], both["direction"], both["peer"])
    row_keys, other_keys = keys[: len(rows)], keys[len(rows) :]
    order = np.argsort(other_keys)
    position = np.searchsorted(other_keys[order], row_keys)
    nearest = order[np.minimum(position, len(others) - 1)]
    return other_keys[nearest] == row_keys, nearest


def _ranks(
    batch: RecordBatch,
    operations: np.ndarray,
    owner: np.ndarray,
    phases: np.ndarray,
    phase_owner: np.ndarray,
    cuts: np.ndarray,
) -> np.ndarray:
    """Return the RANK row of each rank at the time of reading.

    Updates in `cuts` when each rank last completed a step and last called a receive.
    """
    rows = np.zeros(len(batch.ranks), RANK)
    rows["rank"], rows["read_at_s"] = batch.column("rank"), batch.column("read_at_s")
    rows["alive"], rows["ending"] = batch.column("is_alive"), batch.column("ending")
    rows["offset_s"], rows["offset_error_s"] = (
        batch.column("offset_s"),
        batch.column("offset_error_s"),
    )
    rows["phase"], rows["marks_steps"], rows["step"] = -1, cuts["marks_steps"], cuts["step"]
    moved_s = cuts["moved_s"].copy()
    for name in ("enqueued_s", "started_s", "ended_s"):
        np.maximum.at(moved_s, owner, np.where(operations[name] > 0, operations[name], -np.inf))
    np.maximum.at(rows["step"], owner, operations["step"])
    np.add.at(rows["failed"], owner, ((operations["flags"] & Flag.FAILED) > 0).astype(np.uint32))
    # Endless loops of user code collect garbage too: it is no sign of progress.
    counts = phases["code"] != Phase.GARBAGE_COLLECTION
    marks, mark_owner = phases.compress(counts), phase_owner[counts]
    for name in ("enqueued_s", "ended_s"):
        np.maximum.at(moved_s, mark_owner, np.where(marks[name] > 0, marks[name], -np.inf))
    np.maximum.at(rows["step"], mark_owner, marks["step"])
    # A phase left by an exception never ends; only the newest of its kind can be open.
    is_step = marks["code"] == Phase.STEP
    steps, others = marks.compress(is_step), marks.compress(~is_step)
    rows["marks_steps"][mark_owner[is_step]] = True
    newest_owner, newest = _newest_begun(steps, mark_owner[is_step])
    rows["in_step"][newest_owner] = steps["ended_s"][newest] <= 0
    is_receive = operations["code"] == Operation.RECEIVE
    receives = operations.compress(is_receive)
    newest_owner, newest = _newest_begun(receives, owner[is_receive])
    later = receives["enqueued_s"][newest] > cuts["received_s"][newest_owner]
    newest_owner, newest = newest_owner[later], newest[later]
    for name, source in (("received_s", "enqueued_s"), ("received_from", "peer")):
        cuts[name][newest_owner] = receives[source][newest]
    ended = steps["ended_s"] > 0
    np.maximum.at(cuts["stepped_s"], mark_owner[is_step][ended], steps["ended_s"][ended])
    has_received = np.isfinite(cuts["stepped_s"]) & (cuts["received_s"] > cuts["stepped_s"])
    rows["received_from"] = np.where(has_received, cuts["received_from"], -1)
    newest_owner, newest = _newest_begun(others, mark_owner[~is_step])
    is_open = others["ended_s"][newest] <= 0
    rows["phase"][newest_owner[is_open]] = others["code"][newest[is_open]]
    rows["phase_s"][newest_owner[is_open]] = others["enqueued_s"][newest[is_open]]
    rows["moved_s"] = moved_s
    return rows


def _newest_begun(records: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the owners that have records, and the position of the record that each began last."""
    if not len(records):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort((records["enqueued_s"], owner))
    last = np.append(owner[order][1:] != owner[order][:-1], True)
    return owner[order][last], order[last]


def _measures(batch: RecordBatch, cuts: np.ndarray) -> np.ndarray:
    """Return the measures not yet reported.

    Updates in `cuts` the newest reported measure.
    """
    is_judged = batch.records["code"] != Measure.TOKENS
    chosen = np.flatnonzero((batch.records["kind"] == Kind.MEASURE) & is_judged)
    chosen = chosen[batch.records["stamp"][chosen] > cuts["measured"][batch.owner[chosen]]]
    records, owner = batch.records.take(chosen), batch.owner[chosen]
    rows = np.zeros(len(records), MEASURE)
    rows["rank"] = batch.column("rank")[owner]
    rows["step"] = np.where(records["step"] > 0, records["step"], records["number"])
    rows["code"], rows["communicator"] = records["code"], records["communicator"]
    rows["value"] = np.ascontiguousarray(records["nbytes"]).view(np.float64)
    rows["at_s"] = records["enqueued_s"] + batch.column("offset_s")[owner]
    np.maximum.at(cuts["measured"], owner, records["stamp"])
    return rows
