"""Keeps each rank's newest records, and for each record the reading that last changed it.

Every daemon of the tree has one, whether it reads rings or receives summaries. A record is
identified by its lane (operations in one, phases and measures in the other) and its stamp, which
grows with its position there; it changes when its operation or phase ends. Every change gets the
number of the reading that brought it, so a request for "the changes since number n" needs no state
about the requester: a parent that restarts requests the changes since 0.

Not thread-safe; the daemon's working thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from keepstep.monitor.records import (
    RECORD,
    Communicator,
    Ending,
    JobRecords,
    Kind,
    Measure,
    RankRecords,
    as_bytes,
    is_open,
    joined,
)

_FIRST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The identity of a rank, and when it was last read.

    Args:
        rank: global rank.
        node: name of its node.
        pid: its process on that node.
        incarnation: of the writer of its records.
        is_alive: whether the process exists.
        ending: how the process recorded that it ended.
        read_at_s: node's monotonic clock when its ring was last read.
        progress_at_s: the same clock when a reading last brought a new or changed record.
        generation: of the job, from its ring; 0 where generations are not counted.
        world_size: number of ranks, from its ring; 0: not known.
        created_at_s: wall clock when its ring was created: the only clock that nodes share.
    """

    rank: int
    node: str
    pid: int
    incarnation: str
    is_alive: bool
    ending: Ending
    read_at_s: float
    progress_at_s: float
    generation: int = 0
    world_size: int = 0
    created_at_s: float = 0.0


def is_stale(state: RankState, newest: RankState | None) -> bool:
    """Return whether a dead rank belongs to an earlier launch of another number of ranks.

    Needed for a node that the job has left, or that its next launch does not use: it has no newer
    rings. Generations cannot be compared instead: torchrun counts them on each node separately.

    Args:
        state: of the rank.
        newest: the rank whose ring was created last.
    """
    if newest is None or state.is_alive or state.created_at_s >= newest.created_at_s:
        return False
    are_sizes_known = state.world_size > 0 and newest.world_size > 0
    return are_sizes_known and state.world_size != newest.world_size


def newest_of(states: Iterable[RankState]) -> RankState | None:
    """Return the rank whose ring was created last, among the living ranks if there are any."""
    return max(states, key=_recency, default=None)


def _recency(state: RankState) -> tuple[bool, float]:
    return state.is_alive, state.created_at_s


@dataclass(frozen=True, slots=True)
class ChangedRecords:
    """Records that are new or have changed.

    Args:
        records: the records.
        ended_before_s: the previous `ended_s` of each; 0.0 if it was open, or is new.
    """

    records: np.ndarray
    ended_before_s: np.ndarray

    def __len__(self) -> int:
        return len(self.records)


class _RecordLane:
    """The newest `capacity` records of one lane, by stamp, with the reading that changed each.

    They lie in buffers of twice the capacity and are moved to the front when those are full, so the
    cost of a merge is proportional to the new records. Stamps are also kept in a separate array:
    searching them in the records, 64 bytes apart, would load all records into the cache.

    A ring is read back to its oldest open record, which may lie before what is kept here. What is
    read again from before is no change, except that an open record has ended meanwhile.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records = np.empty(2 * capacity, RECORD)
        self._stamps = np.empty(2 * capacity, np.uint64)
        self._changed = np.empty(2 * capacity, np.int64)
        self._end = 0
        self._open_before = np.empty(0, np.uint64)
        """Stamps of records that were open when they ceased to be kept."""

    @property
    def records(self) -> np.ndarray:
        """The records, by stamp."""
        return self._records[self._begin : self._end]

    @property
    def changed(self) -> np.ndarray:
        """For each record, the number of the reading that last changed it."""
        return self._changed[self._begin : self._end]

    @property
    def _begin(self) -> int:
        return max(0, self._end - self._capacity)

    def merge(self, fresh: np.ndarray, number: int) -> ChangedRecords:
        """Merge records, in the order of their stamps; all of the lane, or some."""
        if not len(fresh):
            return ChangedRecords(fresh, np.empty(0))
        ended = np.empty(0, RECORD)
        if self._end - self._begin == self._capacity:
            is_before = fresh["stamp"] < self._stamps[self._begin]
            if is_before.any():
                ended = self._ended_before(fresh.compress(is_before))
                fresh = fresh.compress(~is_before)
        begin, end = self._begin, self._end
        stamps, kept = np.ascontiguousarray(fresh["stamp"]), self._stamps[begin:end]
        place = np.searchsorted(kept, stamps)
        known = np.zeros(len(fresh), bool)
        inside = place < len(kept)
        known[inside] = kept[place[inside]] == stamps[inside]
        at, newer = begin + place[known], fresh.compress(known)
        older = self._records.take(at)
        # The start of an ended record is final. An end may still move later, never earlier.
        differs = (
            (newer["ended_s"] > older["ended_s"])
            | (newer["started_s"] != older["started_s"])
            | (newer["flags"] != older["flags"])
        )
        at, newer, before = at[differs], newer.compress(differs), older["ended_s"][differs]
        as_bytes(self._records)[at] = as_bytes(newer)
        self._changed[at] = number
        added = fresh.compress(~known)
        if len(added):
            self._add(added, number)
        return ChangedRecords(
            joined([ended, newer, added]),
            np.concatenate([np.zeros(len(ended)), before, np.zeros(len(added))]),
        )

    def _ended_before(self, records: np.ndarray) -> np.ndarray:
        """Return those of records from before the kept ones that have ended since they were."""
        has_ended = np.isin(records["stamp"], self._open_before) & ~is_open(records)
        ended: np.ndarray = records.compress(has_ended)
        self._open_before = np.setdiff1d(self._open_before, ended["stamp"])
        return ended

    def _add(self, added: np.ndarray, number: int) -> None:
        """Add records that are not kept, and note which open ones cease to be."""
        count = self._end - self._begin
        is_later = not count or added["stamp"][0] > self._stamps[self._end - 1]
        self._append(added[-self._capacity :], number)
        if not is_later:
            self._sort()
        first = self._end - count - min(len(added), self._capacity)
        parts = [added[: -self._capacity], self._records[first : self._begin]]
        stamps = [part["stamp"][is_open(part)] for part in parts]
        # As many as are kept: of those further back, a ring has hardly any left.
        self._open_before = np.concatenate([self._open_before, *stamps])[-self._capacity :]

    def _append(self, added: np.ndarray, number: int) -> None:
        if self._end + len(added) > len(self._records):
            begin, count = self._begin, self._end - self._begin
            for buffer in (as_bytes(self._records), self._stamps, self._changed):
                buffer[:count] = buffer[begin : self._end]
            self._end = count
        place = slice(self._end, self._end + len(added))
        as_bytes(self._records)[place] = as_bytes(added)
        self._stamps[place], self._changed[place] = added["stamp"], number
        self._end += len(added)

    def _sort(self) -> None:
        order = np.argsort(self._stamps[: self._end], kind="stable")
        for buffer in (self._records, self._stamps, self._changed):
            buffer[: self._end] = buffer[: self._end][order]


class RankHistory:
    """The newest records of one rank: up to `capacity` operations, and as many marks."""

    def __init__(self, state: RankState, capacity: int) -> None:
        self.state = state
        self.highest_step = 0
        """Over all records so far."""
        self.turned_at = 0
        """The reading by which the writer began, or whether and how it lives changed last."""
        self._operations = _RecordLane(capacity)
        self._marks = _RecordLane(capacity)
        self._sorted: np.ndarray | None = None

    @property
    def records(self) -> np.ndarray:
        """All records, by the time they began. Must not be written to."""
        if self._sorted is None:
            self._sorted = _by_begin([self._operations.records, self._marks.records])
        return self._sorted

    def merge(self, fresh: np.ndarray, number: int) -> ChangedRecords:
        """Merge all or some records of the ring; return those that are new or have changed."""
        if not len(fresh):
            return ChangedRecords(fresh, np.empty(0))
        is_operation = fresh["kind"] == Kind.OPERATION
        parts = []
        for lane, records in (
            (self._operations, fresh.compress(is_operation)),
            (self._marks, fresh.compress(~is_operation)),
        ):
            if len(records) > 1 and not (records["stamp"][:-1] < records["stamp"][1:]).all():
                records = records.take(np.unique(records["stamp"], return_index=True)[1])
            parts.append(lane.merge(records, number))
        changed = ChangedRecords(
            joined([part.records for part in parts]),
            np.concatenate([part.ended_before_s for part in parts]),
        )
        if len(changed):
            self._sorted = None
            self.highest_step = max(self.highest_step, int(changed.records["step"].max()))
        return changed

    def newest_operations(self, count: int) -> np.ndarray:
        """Return a copy of the newest `count` operations, in the order in which they were called.

        Like the next two it costs little, other than `records`, which sorts all.
        """
        newest: np.ndarray = self._operations.records[-count:].copy()
        return newest

    def newest_measure(self, measure: Measure) -> float | None:
        """Return the newest value of a measure; None if none is among the records."""
        records = self._marks.records
        values = records["nbytes"][(records["kind"] == Kind.MEASURE) & (records["code"] == measure)]
        return float(values[-1:].copy().view(np.float64)[0]) if len(values) else None

    def open_records(self) -> np.ndarray:
        """Return a copy of the records that have not ended, by begin."""
        lanes = (self._operations.records, self._marks.records)
        return _by_begin([records.compress(is_open(records)) for records in lanes])

    def of_step(self, step: int, *, include_later_open: bool) -> np.ndarray:
        """Return a copy of the records of a step, by begin; also open ones of later steps."""
        parts = []
        for records in (self._operations.records, self._marks.records):
            is_included = records["step"] == step
            if include_later_open:
                is_included |= (records["step"] > step) & is_open(records)
            parts.append(records.compress(is_included))
        return _by_begin(parts)

    def since(self, number: int) -> np.ndarray:
        """Return the records that changed after reading `number`."""
        return joined(
            [
                lane.records.compress(lane.changed > number)
                for lane in (self._operations, self._marks)
            ]
        )

    def since_and_open(self, number: int) -> np.ndarray:
        """Return the records that changed after reading `number`, and open ones, by begin."""
        lanes = (self._operations, self._marks)
        parts = [
            lane.records.compress((lane.changed > number) | is_open(lane.records)) for lane in lanes
        ]
        return _by_begin(parts)


def _turns_of(state: RankState) -> tuple[object, ...]:
    return state.is_alive, state.ending, state.generation, state.world_size, state.node


def _by_begin(parts: list[np.ndarray]) -> np.ndarray:
    both = joined(parts)
    return both.take(np.argsort(both["enqueued_s"], kind="stable"))


class RecordHistory:
    """All ranks' newest records, and the process groups that they name.

    Args:
        capacity: operations kept of each rank, and as many phases and measures.
    """

    def __init__(self, capacity: int) -> None:
        self.number = _FIRST
        self.ranks: dict[int, RankHistory] = {}
        self.communicators: dict[int, Communicator] = {}
        self.newest: RankState | None = None
        """The result of `newest_of` for all ranks; kept, because a root asks for it with every
        summary, and looking at every rank would cost the square of their number."""
        self._capacity = capacity
        self._read_number: dict[int, int] = {}
        self._communicators_at: dict[int, int] = {}

    def begin(self) -> int:
        """Begin a reading; records merged from now on get the returned number."""
        self.number += 1
        return self.number

    def merge(
        self, state: RankState, fresh: np.ndarray, capacity: int | None = None
    ) -> ChangedRecords:
        """Merge records of a rank; return those that are new or have changed.

        A new incarnation of a rank begins with an empty history: its positions, and perhaps its
        node and its clock, have changed.

        Args:
            state: of the rank.
            fresh: its records.
            capacity: to use for this rank if its history begins now; that of all if not given.
        """
        rank = self.ranks.get(state.rank)
        if rank is None or not _is_same_writer(rank.state, state):
            rank = self.ranks[state.rank] = RankHistory(state, capacity or self._capacity)
            rank.turned_at = self.number
        elif _turns_of(rank.state) != _turns_of(state):
            rank.turned_at = self.number
        changed = rank.merge(fresh, self.number)
        progress_at_s = max(
            state.progress_at_s, state.read_at_s if len(changed) else rank.state.progress_at_s
        )
        rank.state = replace(state, progress_at_s=progress_at_s)
        self._read_number[state.rank] = self.number
        self._update_newest(rank.state)
        return changed

    def learn(self, communicators: Iterable[Communicator]) -> None:
        """Add process groups. An identity is derived from name and ranks, so none ever changes."""
        for communicator in communicators:
            if communicator.identity not in self.communicators:
                self.communicators[communicator.identity] = communicator
                self._communicators_at[communicator.identity] = self.number

    def communicators_since(self, number: int) -> tuple[Communicator, ...]:
        """Return the process groups that were added after reading `number`."""
        return tuple(
            self.communicators[key] for key, at in self._communicators_at.items() if at > number
        )

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Drop all other ranks, and process groups without a rank that remains."""
        kept = set(ranks)
        for rank in set(self.ranks) - kept:
            del self.ranks[rank]
            del self._read_number[rank]
        if self.newest is not None and self.newest.rank not in kept:
            self._find_newest()
        for identity in [
            key for key, group in self.communicators.items() if kept.isdisjoint(group.ranks)
        ]:
            del self.communicators[identity]
            del self._communicators_at[identity]

    def turned_since(self, number: int) -> Iterator[RankHistory]:
        """Yield the ranks whose writer or life changed after reading `number`, by rank."""
        for rank in sorted(self.ranks):
            if self.ranks[rank].turned_at > number:
                yield self.ranks[rank]

    def updated_since(self, number: int) -> Iterator[RankHistory]:
        """Yield the ranks that were merged after reading `number`, by rank."""
        for rank in sorted(self.ranks):
            if self._read_number[rank] > number:
                yield self.ranks[rank]

    def job(self) -> JobRecords:
        """Return all records, the input of diagnosis. The arrays must not be written to."""
        return JobRecords(
            {
                rank: RankRecords(
                    rank=rank,
                    node=history.state.node,
                    records=history.records,
                    read_at_s=history.state.read_at_s,
                    is_alive=history.state.is_alive,
                    ending=history.state.ending,
                )
                for rank, history in sorted(self.ranks.items())
            },
            dict(self.communicators),
        )

    def _update_newest(self, state: RankState) -> None:
        newest = self.newest
        if newest is None or _recency(state) >= _recency(newest):
            self.newest = state
        elif state.rank == newest.rank:
            # It has died, or its ring seems older than before: another may be the newest now.
            self._find_newest()

    def _find_newest(self) -> None:
        self.newest = newest_of(rank.state for rank in self.ranks.values())


def _is_same_writer(one: RankState, other: RankState) -> bool:
    return (one.incarnation, one.node) == (other.incarnation, other.node)


def sample_operations(records: np.ndarray, budget: int) -> np.ndarray:
    """Return a sample of about `budget` operations that are not open, and all other records.

    The operations kept are those whose number is a multiple of the least power of two that fits the
    budget. Numbers are the same on all ranks of a group, and powers of two divide each other, so
    the operations kept on different ranks coincide even if their samples have different strides:
    collectives remain comparable. The newest operation of each group is kept too, because it shows
    how far the rank has come.
    """
    finished = (records["kind"] == Kind.OPERATION) & ~is_open(records)
    count = int(finished.sum())
    if count <= budget:
        return records
    keep = ~finished
    backwards = records["communicator"][::-1]
    newest = len(records) - 1 - np.unique(backwards, return_index=True)[1]
    keep[newest] = True
    numbers = records["number"].astype(np.int64)
    # The greatest power of two that divides the number: the record is kept up to that stride.
    lowest = np.where(finished, numbers & -numbers, 0)
    stride = 1
    while (finished & (lowest >= stride)).sum() > budget and stride < 1 << 40:
        stride *= 2
    kept: np.ndarray = records[keep | (finished & (lowest >= stride))]
    return kept
