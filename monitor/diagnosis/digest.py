"""From records to a digest: what a node (or a rack, or the whole job) tells upwards, computed where the records are.

Readings overlap: rings are read every half second, and operations complete after they were first seen. Each operation is accounted for
exactly once, by its time of arrival on its own rank's clock: a reading accounts for what arrived after the last reading's cut, up to
the first operation still under way, which is the next cut. Nothing here compares clocks of different nodes.

An operation that never says it ended counts as ended once a later one of the same channel has, for those end in order, and as forgotten
once its rank is three steps on, for nobody can have waited for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.accounts import account_operations
from keepstep.monitor.diagnosis.signatures import signatures
from keepstep.monitor.diagnosis.tables import FRONTIER, HISTORY, MEASURE, RANK, STEP, Digest, merge
from keepstep.monitor.records import Communicator, Flag, Kind, Operation, Phase, RankRecords, joined

FORGOTTEN_STEPS = 3

CUT = np.dtype(
    [
        ("rank", "<i4"),
        ("cut_s", "<f8"),  # arrivals up to here are accounted for
        ("busy_s", "<f8"),  # when the last of these ended
        ("skip_step", "<u4"),  # the step in which reading began: known in part only
        ("stamp", "<u8"),  # newest record seen
        ("measured", "<u8"),  # newest measure seen
        ("moved_s", "<f8"),  # last sign of life
        ("step", "<u4"),  # highest step heard of
        ("marks_steps", "?"),
        ("stepped_s", "<f8"),  # when its newest whole step ended
        ("received_s", "<f8"),  # when it last called a receive
        ("received_of", "<i4"),  # and of whom
    ]
)


@dataclass(frozen=True, slots=True)
class DigestState:
    """What a reader of rings keeps between readings; bounded by its ranks and their communicators."""

    cuts: np.ndarray
    frontiers: np.ndarray
    steps: np.ndarray


EMPTY_DIGEST_STATE = DigestState(np.zeros(0, CUT), np.zeros(0, FRONTIER), np.zeros(0, STEP))


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """All records of all ranks in one array, and whose they are.

    Args:
        ranks: told ranks, ascending by rank.
        records: their records, one after the other; dtype RECORD.
        owner: for each record, the position of its rank in `ranks`.
    """

    ranks: tuple[RankRecords, ...]
    records: np.ndarray
    owner: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """Return one attribute of the ranks as an array."""
        return np.array([getattr(one, name) for one in self.ranks])


def digest(
    told: Iterable[RankRecords],
    communicators: Mapping[int, Communicator],
    memory: DigestState = EMPTY_DIGEST_STATE,
) -> tuple[DigestState, Digest]:
    """Return what the ranks' records come to since the last reading, and what to remember for the next.

    Ranks that are missing keep their memory. A rank of which records were overwritten unread is started afresh.
    """
    ranks = tuple(sorted((one for one in told), key=lambda one: one.rank))
    if not ranks:
        return memory, merge((), communicators)
    lengths = np.array([len(one.records) for one in ranks])
    records = joined([one.records for one in ranks])
    reading = RecordBatch(ranks, records, np.repeat(np.arange(len(ranks)), lengths))
    cuts = _cuts(reading, memory)
    newest_stamp = _newest_stamps(reading)
    reading = _unread(reading, cuts)
    records = reading.records

    is_operation = records["kind"] == Kind.OPERATION
    operations, operation_owner = _newest(
        records.compress(is_operation), reading.owner[is_operation]
    )
    frontiers, is_open = _frontiers(reading, operations, operation_owner, memory.frontiers)
    is_phase = records["kind"] == Kind.PHASE
    phases, phase_owner = records.compress(is_phase), reading.owner[is_phase]
    rows = _ranks(reading, operations, operation_owner, phases, phase_owner, cuts)
    for name in ("marks_steps", "moved_s", "step"):
        cuts[name] = rows[name]

    continued = np.isin(memory.steps["rank"], cuts["rank"][~np.isneginf(cuts["cut_s"])])
    accounts = account_operations(
        cuts=cuts,
        partial=memory.steps[continued],
        operations=operations,
        owner=operation_owner,
        is_open=is_open,
        phases=phases,
        phase_owner=phase_owner,
        offsets_s=rows["offset_s"],
        communicators=communicators,
    )
    measures = _measures(reading, cuts)
    cuts["stamp"] = np.maximum(cuts["stamp"], newest_stamp)
    told_ranks = cuts["rank"]
    kept = memory.cuts[~np.isin(memory.cuts["rank"], told_ranks)]
    kept_steps = memory.steps[~np.isin(memory.steps["rank"], told_ranks)]
    kept_frontiers = memory.frontiers[~np.isin(memory.frontiers["rank"], told_ranks)]
    following = DigestState(
        joined([kept, cuts]),
        joined([kept_frontiers, frontiers]),
        joined([kept_steps, accounts.partial]),
    )
    told_digest = Digest(
        ranks=rows,
        frontiers=frontiers,
        steps=accounts.steps,
        collectives=accounts.collectives,
        transfers=accounts.transfers,
        last_arrivals=accounts.last_arrivals,
        messages=accounts.messages,
        measures=measures,
        mismatches=accounts.mismatches,
    )
    return following, merge((told_digest,), communicators)


def _cuts(reading: RecordBatch, memory: DigestState) -> np.ndarray:
    """Return where accounting stands for each rank told; -inf for those not seen before, or read too late."""
    cuts = np.zeros(len(reading.ranks), CUT)
    cuts["rank"] = reading.column("rank")
    for name in ("cut_s", "busy_s", "moved_s", "stepped_s", "received_s"):
        cuts[name] = -np.inf
    if not len(memory.cuts):
        return cuts
    order = np.argsort(memory.cuts["rank"])
    known = memory.cuts[order]
    at = np.minimum(np.searchsorted(known["rank"], cuts["rank"]), len(known) - 1)
    found = known["rank"][at] == cuts["rank"]
    cuts[found] = known[at[found]]
    # Stamps grow by two a record: if the lowest new one is not the next, records were overwritten before they were read.
    stamps = reading.records["stamp"]
    lowest_new = np.full(len(cuts), np.iinfo(np.uint64).max, np.uint64)
    new = stamps > cuts["stamp"][reading.owner]
    np.minimum.at(lowest_new, reading.owner[new], stamps[new])
    lost = (
        found
        & (lowest_new != np.iinfo(np.uint64).max)
        & (lowest_new > cuts["stamp"] + np.uint64(2))
    )
    cuts["cut_s"][lost] = -np.inf
    cuts["busy_s"][lost] = -np.inf
    return cuts


def _newest_stamps(reading: RecordBatch) -> np.ndarray:
    newest = np.zeros(len(reading.ranks), np.uint64)
    np.maximum.at(newest, reading.owner, reading.records["stamp"])
    return newest


def _unread(reading: RecordBatch, cuts: np.ndarray) -> RecordBatch:
    """Drop what was accounted for and cannot change: whatever ended before its rank's cut, and measures told.

    What a ring still holds of the past is most of it, and costs no more than this look.
    """
    records, owner = reading.records, reading.owner
    ended_s = records["ended_s"]
    keep = (ended_s <= 0) | (ended_s > cuts["cut_s"][owner])
    keep &= (records["kind"] != Kind.MEASURE) | (records["stamp"] > cuts["measured"][owner])
    return RecordBatch(reading.ranks, records.compress(keep), owner[keep])


def _newest(operations: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each operation once, sorted by rank, channel and number; of several records of one, the one that ended last."""
    if not len(operations):
        return operations, owner
    channel = _pack_channels(operations, owner)
    order = np.lexsort((operations["ended_s"], operations["number"], channel))
    operations, owner, channel = operations.take(order), owner[order], channel[order]
    last = np.ones(len(operations), bool)
    last[:-1] = (channel[1:] != channel[:-1]) | (
        operations["number"][1:] != operations["number"][:-1]
    )
    return operations.compress(last), owner[last]


def _pack_channels(operations: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return one integer for each (rank, communicator, direction, peer): that within which numbers count."""
    _, communicator = np.unique(operations["communicator"], return_inverse=True)
    code = operations["code"].astype(np.int64)
    direction = np.where(code == Operation.SEND, 1, np.where(code == Operation.RECEIVE, 2, 0))
    peer = np.where(direction > 0, operations["peer"].astype(np.int64) + 1, 0)
    # 24 bits of peers, 2 of direction, 17 of communicators within one reading, and 20 of ranks: 63.
    channel: np.ndarray = (
        ((owner.astype(np.int64) << 17) | communicator) << 2 | direction
    ) << 24 | peer
    return channel


def _frontiers(
    reading: RecordBatch, operations: np.ndarray, owner: np.ndarray, remembered: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return how far every rank is in every channel, and which operations are under way."""
    ranks = reading.column("rank")
    is_open = np.zeros(len(operations), bool)
    rows = np.zeros(0, FRONTIER)
    if len(operations):
        channel = _pack_channels(operations, owner)
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
    same, at = _match_channels(rows, old)
    rows["history"][same] = old["history"][at[same]]
    if len(operations):
        numbers = operations["number"]
        rows["entered"] = np.maximum.reduceat(numbers, starts)
        rows["ended"] = np.maximum.reduceat(np.where(operations["ended_s"] > 0, numbers, 0), starts)
        for name in ("entered", "ended"):
            rows[name][same] = np.maximum(rows[name][same], old[name][at[same]])
        newest_step = np.zeros(len(ranks), np.int64)
        np.maximum.at(newest_step, owner, operations["step"].astype(np.int64))
        is_open = (operations["ended_s"] <= 0) & (numbers > rows["ended"][index])
        is_open &= operations["step"].astype(np.int64) + FORGOTTEN_STEPS > newest_step[owner]
        candidates = np.where(is_open, np.arange(len(operations)), len(operations))
        lowest = np.minimum.reduceat(candidates, starts)
        has_open = lowest < len(operations)
        opened = operations.take(lowest[has_open])
        rows["open"][has_open] = opened["number"]
        rows["open_nbytes"][has_open] = opened["nbytes"]
        rows["open_s"][has_open] = opened["enqueued_s"]
        rows["asynchronous"][has_open] = (opened["flags"] & Flag.ASYNCHRONOUS) > 0
        recent = (numbers + np.uint64(HISTORY) > rows["entered"][index]) & (
            rows["direction"][index] == 0
        )
        slots = (numbers % np.uint64(HISTORY)).astype(np.int64)
        rows["history"][index[recent], slots[recent]] = signatures(operations.compress(recent))
    # A channel of which nothing new was read is as far as it was, and has nothing under way.
    others = np.ones(len(old), bool)
    others[at[same]] = False
    quiet = old[others]
    quiet["open"] = 0
    return joined([rows, quiet]), is_open


def _match_channels(rows: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which frontiers' channels are among those of others, and for those, where."""
    found, at = np.zeros(len(rows), bool), np.zeros(len(rows), np.int64)
    if not len(rows) or not len(others):
        return found, at
    both = joined([rows, others])
    _, communicator = np.unique(both["communicator"], return_inverse=True)
    # 20 bits of ranks, 17 of communicators, 2 of direction (SEND and RECEIVE differ in their lowest bits), 24 of peers.
    keys = (both["rank"].astype(np.int64) << 17 | communicator) << 2 | (
        both["direction"].astype(np.int64) & 3
    )
    keys = keys << 24 | (both["peer"].astype(np.int64) + 1)
    known = keys[len(rows) :]
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known[order], keys[: len(rows)]), len(known) - 1)
    at = order[place]
    return known[at] == keys[: len(rows)], at


def _ranks(
    reading: RecordBatch,
    operations: np.ndarray,
    owner: np.ndarray,
    phases: np.ndarray,
    phase_owner: np.ndarray,
    cuts: np.ndarray,
) -> np.ndarray:
    """Return what there is to say of each rank at the moment of reading."""
    rows = np.zeros(len(reading.ranks), RANK)
    rows["rank"], rows["read_at_s"] = reading.column("rank"), reading.column("read_at_s")
    rows["alive"], rows["ending"] = reading.column("is_alive"), reading.column("ending")
    rows["offset_s"], rows["offset_error_s"] = (
        reading.column("offset_s"),
        reading.column("offset_error_s"),
    )
    rows["phase"], rows["marks_steps"], rows["step"] = -1, cuts["marks_steps"], cuts["step"]
    moved = cuts["moved_s"].copy()
    for name in ("enqueued_s", "started_s", "ended_s"):
        np.maximum.at(moved, owner, np.where(operations[name] > 0, operations[name], -np.inf))
    np.maximum.at(rows["step"], owner, operations["step"])
    np.add.at(rows["failed"], owner, ((operations["flags"] & Flag.FAILED) > 0).astype(np.uint32))
    # Garbage is collected in endless loops of user code as well: it is no sign of progress.
    telling = phases["code"] != Phase.GARBAGE_COLLECTION
    spoken, spoken_owner = phases.compress(telling), phase_owner[telling]
    for name in ("enqueued_s", "ended_s"):
        np.maximum.at(moved, spoken_owner, np.where(spoken[name] > 0, spoken[name], -np.inf))
    np.maximum.at(rows["step"], spoken_owner, spoken["step"])
    # A phase that was left by an exception never ends; only the newest of its kind can be under way.
    is_step = spoken["code"] == Phase.STEP
    steps, others = spoken.compress(is_step), spoken.compress(~is_step)
    rows["marks_steps"][spoken_owner[is_step]] = True
    whose, newest = _newest_begun(steps, spoken_owner[is_step])
    rows["in_step"][whose] = steps["ended_s"][newest] <= 0
    is_receive = operations["code"] == Operation.RECEIVE
    received = operations.compress(is_receive)
    whose, newest = _newest_begun(received, owner[is_receive])
    later = received["enqueued_s"][newest] > cuts["received_s"][whose]
    whose, newest = whose[later], newest[later]
    for name, told in (("received_s", "enqueued_s"), ("received_of", "peer")):
        cuts[name][whose] = received[told][newest]
    ended = steps["ended_s"] > 0
    np.maximum.at(cuts["stepped_s"], spoken_owner[is_step][ended], steps["ended_s"][ended])
    since = np.isfinite(cuts["stepped_s"]) & (cuts["received_s"] > cuts["stepped_s"])
    rows["heard_from"] = np.where(since, cuts["received_of"], -1)
    whose, newest = _newest_begun(others, spoken_owner[~is_step])
    under_way = others["ended_s"][newest] <= 0
    rows["phase"][whose[under_way]] = others["code"][newest[under_way]]
    rows["phase_s"][whose[under_way]] = others["enqueued_s"][newest[under_way]]
    rows["moved_s"] = moved
    return rows


def _newest_begun(records: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the owners that have records, and the position of the record that each began last."""
    if not len(records):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort((records["enqueued_s"], owner))
    last = np.append(owner[order][1:] != owner[order][:-1], True)
    return owner[order][last], order[last]


def _measures(reading: RecordBatch, cuts: np.ndarray) -> np.ndarray:
    """Return the measures not yet told; the newest told one is noted in `cuts`."""
    at = np.flatnonzero(reading.records["kind"] == Kind.MEASURE)
    at = at[reading.records["stamp"][at] > cuts["measured"][reading.owner[at]]]
    records, owner = reading.records.take(at), reading.owner[at]
    rows = np.zeros(len(records), MEASURE)
    rows["rank"] = reading.column("rank")[owner]
    rows["step"] = np.where(records["step"] > 0, records["step"], records["number"])
    rows["code"], rows["communicator"] = records["code"], records["communicator"]
    rows["value"] = np.ascontiguousarray(records["nbytes"]).view(np.float64)
    rows["at_s"] = records["enqueued_s"] + reading.column("offset_s")[owner]
    np.maximum.at(cuts["measured"], owner, records["stamp"])
    return rows
