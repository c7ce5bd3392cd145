"""The bounded memory of a monitor: each rank's newest records, and since which reading each of them is known as it is.

Every daemon of the tree keeps one, whether it reads rings or hears other daemons. A record is known by its lane (operations
in one, phases and measures in the other) and its stamp, which grows with its position there; it changes when what it is
about ends. Every change gets the number of the reading that brought it, so whoever asks "what is new since number n" is
answered without the daemon remembering who asked: a parent that restarts simply asks since 0.

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
    RankRecords,
    as_bytes,
    joined,
)

_FIRST = 1


@dataclass(frozen=True, slots=True)
class RankState:
    """Who a rank is and when it was last heard of.

    Args:
        rank: global rank.
        node: name of its node.
        pid: its process on that node.
        incarnation: of the writer of its records.
        is_alive: whether the process exists.
        ending: what it said of its end.
        read_at_s: node's monotonic clock when its ring was last read.
        progress_at_s: the same clock when a reading last brought a record that was new or had changed.
        generation: of the job, as its ring has it; 0 where nobody counts them.
        world_size: number of ranks, as its ring has it; 0: not known.
        created_at_s: wall clock when its ring was created; nodes of different clocks have no other in common.
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
    """Return whether a rank is of an earlier launch or generation than the newest, whose ranks are of another number, and has died.

    A node that a job left, or that its next launch does without, has no newer rings that would tell. Generations do not: torchrun
    counts them on each node by itself.
    """
    if newest is None or state.is_alive or state.created_at_s >= newest.created_at_s:
        return False
    return 0 < state.world_size != newest.world_size > 0


def newest_of(states: Iterable[RankState]) -> RankState | None:
    """Return the rank whose ring was created last; a living one, if there is any."""
    return max(states, key=lambda state: (state.is_alive, state.created_at_s), default=None)


@dataclass(frozen=True, slots=True)
class ChangedRecords:
    """Records that are new or have changed, and when each was thought to have ended before (0.0: it had not, or is new)."""

    records: np.ndarray
    ended_before_s: np.ndarray

    def __len__(self) -> int:
        return len(self.records)


class _RecordLane:
    """The newest `capacity` records of one lane of a ring, by stamp, with the number of the reading that last changed each.

    They lie in buffers of twice the capacity and are moved to the front when those are full, so taking in what is new costs what is new. Stamps
    are kept apart as well: to search them where they lie, 64 bytes apart, would drag all records through the processor's cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records = np.empty(2 * capacity, RECORD)
        self._stamps = np.empty(2 * capacity, np.uint64)
        self._changed = np.empty(2 * capacity, np.int64)
        self._end = 0

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
        """Take in records in the order of their stamps; all of the lane, or some."""
        if not len(fresh):
            return ChangedRecords(fresh, np.empty(0))
        begin, end = self._begin, self._end
        stamps, kept = np.ascontiguousarray(fresh["stamp"]), self._stamps[begin:end]
        place = np.searchsorted(kept, stamps)
        known = np.zeros(len(fresh), bool)
        inside = place < len(kept)
        known[inside] = kept[place[inside]] == stamps[inside]
        at, newer = begin + place[known], fresh.compress(known)
        older = self._records.take(at)
        # What has ended has its final start too. An end may still move later, never back.
        differs = (newer["ended_s"] > older["ended_s"]) | (newer["started_s"] != older["started_s"])
        at, newer, before = at[differs], newer.compress(differs), older["ended_s"][differs]
        as_bytes(self._records)[at] = as_bytes(newer)
        self._changed[at] = number
        added = fresh.compress(~known)
        if len(added):
            is_later = begin == end or added["stamp"][0] > self._stamps[end - 1]
            self._append(added[-self._capacity :], number)
            if not is_later:
                self._sort()
        return ChangedRecords(
            joined([newer, added]), np.concatenate([before, np.zeros(len(added))])
        )

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
    """The newest records of one rank: up to `capacity` operations and as many phases and measures."""

    def __init__(self, state: RankState, capacity: int) -> None:
        self.state = state
        self._operations = _RecordLane(capacity)
        self._marks = _RecordLane(capacity)
        self._sorted: np.ndarray | None = None

    @property
    def records(self) -> np.ndarray:
        """All of them, by the time they began. Not to be written to."""
        if self._sorted is None:
            both = joined([self._operations.records, self._marks.records])
            self._sorted = both.take(np.argsort(both["enqueued_s"], kind="stable"))
        return self._sorted

    def merge(self, fresh: np.ndarray, number: int) -> ChangedRecords:
        """Take in records, all or only some of those in the ring; return those that are new or have changed."""
        operation = fresh["kind"] == Kind.OPERATION
        parts = []
        for lane, mine in (
            (self._operations, fresh.compress(operation)),
            (self._marks, fresh.compress(~operation)),
        ):
            if len(mine) > 1 and not (mine["stamp"][:-1] < mine["stamp"][1:]).all():
                mine = mine.take(np.unique(mine["stamp"], return_index=True)[1])
            parts.append(lane.merge(mine, number))
        changed = ChangedRecords(
            joined([part.records for part in parts]),
            np.concatenate([part.ended_before_s for part in parts]),
        )
        if len(changed):
            self._sorted = None
        return changed

    def since(self, number: int) -> np.ndarray:
        """Return the records that changed after reading `number`."""
        return joined(
            [
                lane.records.compress(lane.changed > number)
                for lane in (self._operations, self._marks)
            ]
        )

    def since_and_open(self, number: int) -> np.ndarray:
        """Return the records that changed after reading `number`, and those of what is under way, by the time they began."""
        lanes = (self._operations, self._marks)
        parts = [
            lane.records.compress((lane.changed > number) | (lane.records["ended_s"] == 0))
            for lane in lanes
        ]
        both = joined(parts)
        return both.take(np.argsort(both["enqueued_s"], kind="stable"))


class RecordHistory:
    """All ranks' newest records and the process groups they name."""

    def __init__(self, capacity: int) -> None:
        self.number = _FIRST
        self.ranks: dict[int, RankHistory] = {}
        self.communicators: dict[int, Communicator] = {}
        self._capacity = capacity
        self._heard: dict[int, int] = {}
        self._communicators_at: dict[int, int] = {}

    def begin(self) -> int:
        """Begin a reading: what is merged from here on carries the returned number."""
        self.number += 1
        return self.number

    def merge(self, state: RankState, fresh: np.ndarray) -> ChangedRecords:
        """Take in what a rank told; return the records that are new or have changed.

        A new incarnation of a rank begins with nothing: its positions, and perhaps its node and its clock, are others.
        """
        kept = self.ranks.get(state.rank)
        if kept is None or (kept.state.incarnation, kept.state.node) != (
            state.incarnation,
            state.node,
        ):
            kept = self.ranks[state.rank] = RankHistory(state, self._capacity)
        changed = kept.merge(fresh, self.number)
        progress_at_s = max(
            state.progress_at_s, state.read_at_s if len(changed) else kept.state.progress_at_s
        )
        kept.state = replace(state, progress_at_s=progress_at_s)
        self._heard[state.rank] = self.number
        return changed

    def learn(self, communicators: Iterable[Communicator]) -> None:
        """Take in process groups. An identity follows from name and ranks, so what is known does not change."""
        for communicator in communicators:
            if communicator.identity not in self.communicators:
                self.communicators[communicator.identity] = communicator
                self._communicators_at[communicator.identity] = self.number

    def communicators_since(self, number: int) -> tuple[Communicator, ...]:
        """Return the process groups that were learnt after reading `number`."""
        return tuple(
            self.communicators[key] for key, at in self._communicators_at.items() if at > number
        )

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Forget all other ranks, and process groups none of whose ranks is left."""
        kept = set(ranks)
        for rank in set(self.ranks) - kept:
            del self.ranks[rank]
            del self._heard[rank]
        for identity in [
            key for key, group in self.communicators.items() if kept.isdisjoint(group.ranks)
        ]:
            del self.communicators[identity]
            del self._communicators_at[identity]

    def updated_since(self, number: int) -> Iterator[RankHistory]:
        """Yield the ranks that were heard of after reading `number`, by rank."""
        for rank in sorted(self.ranks):
            if self._heard[rank] > number:
                yield self.ranks[rank]

    def job(self) -> JobRecords:
        """Return everything as diagnosis takes it. The arrays are the history's own and not to be written to."""
        return JobRecords(
            {
                rank: RankRecords(
                    rank,
                    kept.state.node,
                    kept.records,
                    kept.state.read_at_s,
                    kept.state.is_alive,
                    kept.state.ending,
                )
                for rank, kept in sorted(self.ranks.items())
            },
            dict(self.communicators),
        )


def sample_operations(records: np.ndarray, budget: int) -> np.ndarray:
    """Return at most about `budget` finished operations, the same ones on all ranks, and everything that is not a finished operation.

    Operations stay whose number is a multiple of the least power of two that keeps within the budget. Numbers are the same on all ranks of
    a group and powers of two divide each other, so what ranks keep coincides even if they sample_operations differently: collectives stay comparable.
    The newest operation of each group stays too, for it tells how far the rank has come.
    """
    finished = (records["kind"] == Kind.OPERATION) & (records["ended_s"] > 0)
    count = int(finished.sum())
    if count <= budget:
        return records
    keep = ~finished
    backwards = records["communicator"][::-1]
    newest = len(records) - 1 - np.unique(backwards, return_index=True)[1]
    keep[newest] = True
    numbers = records["number"].astype(np.int64)
    # The number of trailing zero bits says up to which power of two a record stays.
    lowest = np.where(finished, numbers & -numbers, 0)
    stride = 1
    while (finished & (lowest >= stride)).sum() > budget and stride < 1 << 40:
        stride *= 2
    kept: np.ndarray = records[keep | (finished & (lowest >= stride))]
    return kept
