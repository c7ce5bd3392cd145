"""Tabulates the duration of each rank's steps and phases, and lists the spans of one step. Pure.

The table is fed with records as they end, so a monitor can show many more steps than it keeps
records of. The duration of a step is that of its `STEP` phase; the other phases are parts of it and
may be missing if nothing records them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.records import (
    DTYPES,
    Communicator,
    Ending,
    Flag,
    Kind,
    Operation,
    Phase,
    RankRecords,
    arrival_times,
    is_open,
)
from keepstep.monitor.telemetry.record_history import ChangedRecords

_PHASES = len(Phase)
_STUCK = 3.0
"""A rank stands still if it needs this many times the duration of its last step."""


class StepTable:
    """Seconds per phase of one rank's newest `capacity` steps.

    If a step is done again, its duration is that of the last attempt; the durations of its phases
    are added up over the attempts.
    """

    def __init__(self, capacity: int) -> None:
        self._step = np.zeros(capacity, np.int64)
        self._seconds = np.zeros((capacity, _PHASES), np.float32)
        self.last_step = 0
        self.last_step_s = 0.0
        self.last_ended_s = 0.0
        """When the last step ended, by the node's clock."""

    def feed(self, changed: ChangedRecords) -> None:
        """Add records that are new or have changed.

        Only ended phases count; a phase that was prolonged adds the difference.
        """
        records = changed.records
        counted = (records["kind"] == Kind.PHASE) & (records["ended_s"] > 0) & (records["step"] > 0)
        counted &= records["code"] < _PHASES
        # As lists of numbers: accessing the rows of a structured array one by one is slow.
        phases = records.compress(counted)
        columns = (
            phases["step"],
            phases["code"],
            phases["enqueued_s"],
            changed.ended_before_s[counted],
            phases["ended_s"],
        )
        for step, code, began_s, before_s, ended_s in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            slot = step % len(self._step)
            if self._step[slot] > step and step > self.last_step - len(self._step):
                continue
            if self._step[slot] != step:
                self._step[slot] = step
                self._seconds[slot] = 0
            elif code == Phase.STEP and before_s == 0:
                self._seconds[slot, code] = 0
            self._seconds[slot, code] += ended_s - max(began_s, before_s)
            if code == Phase.STEP:
                self.last_step, self.last_step_s = step, float(self._seconds[slot, code])
                self.last_ended_s = ended_s

    def seconds(self, steps: Sequence[int], phase: Phase) -> np.ndarray:
        """Return seconds of a phase by step; NaN if a step is not known."""
        numbers = np.asarray(steps, np.int64)
        slots = numbers % len(self._step)
        known = (self._step[slots] == numbers) & (self._seconds[slots, Phase.STEP] > 0)
        return np.where(known, self._seconds[slots, phase], np.nan)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Step times of ranks over steps.

    Args:
        steps: the columns.
        rows: the ranks that each row represents; several if there are more ranks than rows.
        seconds: shape [rows, steps]; the slowest rank's of the row, NaN if not known.
    """

    steps: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    seconds: np.ndarray


def heat_map(
    tables: Mapping[int, StepTable], columns: int, rows: int, phase: Phase = Phase.STEP
) -> HeatMap:
    """Return the durations of the newest `columns` steps, or of one phase of them, of all ranks.

    Neighbouring ranks share a row, so that there are at most `rows` rows.
    """
    last = max((table.last_step for table in tables.values()), default=0)
    steps = tuple(range(max(1, last - columns + 1), last + 1))
    if not tables or not steps:
        return HeatMap((), (), np.empty((0, 0)))
    grouped = group_ranks(tables, rows)
    cells = np.full((len(grouped), len(steps)), np.nan)
    for row, members in enumerate(grouped):
        cells[row] = np.fmax.reduce([tables[rank].seconds(steps, phase) for rank in members])
    if phase != Phase.STEP and not np.nanmax(cells, initial=0.0) > 0:
        cells[:] = np.nan  # Nothing records this phase: its duration is unknown, not zero.
    return HeatMap(steps, grouped, cells)


def typical_step_s(tables: Mapping[int, StepTable], steps: int = 50) -> float | None:
    """Return the median duration of the newest steps, each of its slowest rank.

    None before the first step has ended.
    """
    newest = heat_map(tables, steps, 1)
    finite_s = newest.seconds[np.isfinite(newest.seconds)]
    return float(np.median(finite_s)) if finite_s.size else None


def group_ranks(ranks: Iterable[int], rows: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in at most `rows` groups of equally many neighbours."""
    order = sorted(ranks)
    per_row = max(1, math.ceil(len(order) / rows))
    return tuple(tuple(order[first : first + per_row]) for first in range(0, len(order), per_row))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """One bar of a timeline.

    Args:
        kind: "phase" or "operation".
        name: of the phase or operation.
        begin_s, end_s: by the job's clock; `end_s` is None while it has not ended.
        facts: further fields, for people.
    """

    kind: str
    name: str
    begin_s: float
    end_s: float | None
    facts: Mapping[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far a rank is.

    Args:
        step: highest step recorded.
        last_step: newest step that it ended; 0 if none.
        last_step_s: its duration.
        last_ended_s: when it ended, by the node's clock.
        read_at_s: when the rank was read, by the same clock.
        is_alive: whether its process exists.
        ending: how the process recorded that it ended.
    """

    step: int
    last_step: int
    last_step_s: float
    last_ended_s: float
    read_at_s: float
    is_alive: bool = True
    ending: Ending = Ending.NONE


def newest_step(ranks: Collection[RankProgress]) -> int | None:
    """Return the newest step that every rank has ended.

    If there is none, or ranks stand still, return the step of the rank that is furthest behind.
    """
    ended = [rank.last_step for rank in ranks if rank.last_step]
    have_all_ended_one = bool(ended) and len(ended) == len(ranks)
    if have_all_ended_one and not _stand_still(ranks):
        return min(ended)
    return _furthest_behind(ranks)


def stand_still_in(ranks: Collection[RankProgress], step: int) -> bool:
    """Return whether ranks stand still and the one furthest behind is in this step."""
    return _stand_still(ranks) and step == _furthest_behind(ranks)


def _stand_still(ranks: Iterable[RankProgress]) -> bool:
    """Return whether some rank has not ended a step for far longer than its last step took."""
    return any(
        rank.last_step > 0 and rank.read_at_s - rank.last_ended_s > _STUCK * rank.last_step_s
        for rank in ranks
    )


def _furthest_behind(ranks: Iterable[RankProgress]) -> int | None:
    """Return the lowest of the ranks' newest steps.

    A dead rank counts only if its step is at most one before those of the living ranks.
    """
    unfinished = [rank for rank in ranks if rank.ending != Ending.FINISHED]
    living = [rank.step for rank in unfinished if rank.step and rank.is_alive]
    if not living:
        return max((rank.step for rank in unfinished), default=0) or None
    return min([*living, *(rank.step for rank in unfinished if rank.step >= min(living) - 1 > 0)])


def timeline(
    ranks: Mapping[int, RankRecords],
    communicators: Mapping[int, Communicator],
    step: int,
    limit: int,
    *,
    include_later_open: bool = False,
) -> dict[int, tuple[TimelineSpan, ...]]:
    """Return the phases and operations of every rank in one step, in order of time.

    Args:
        ranks: records of the ranks.
        communicators: of the job.
        step: number of the step.
        limit: the longest operations of each rank to return, at most.
        include_later_open: whether to add open records of later steps.
    """
    return {
        rank: _spans(rank_records, communicators, step, limit, include_later_open)
        for rank, rank_records in sorted(ranks.items())
    }


def _spans(
    rank_records: RankRecords,
    communicators: Mapping[int, Communicator],
    step: int,
    limit: int,
    include_later_open: bool,
) -> tuple[TimelineSpan, ...]:
    records, offset_s = rank_records.records, rank_records.offset_s
    is_included = records["step"] == step
    if include_later_open:
        is_included |= (records["step"] > step) & is_open(records)
    records = records[is_included]
    phases = records[records["kind"] == Kind.PHASE]
    operations = records[records["kind"] == Kind.OPERATION]
    if len(operations) > limit:
        until_s = np.where(
            is_open(operations), rank_records.read_at_s, np.maximum(operations["ended_s"], 0.0)
        )
        longest = np.argsort(until_s - arrival_times(operations))[-limit:]
        operations = operations[np.sort(longest)]
    spans = [_phase_span(record, offset_s) for record in phases]
    spans += [_operation_span(record, communicators, offset_s) for record in operations]
    return tuple(sorted(spans, key=lambda span: (span.kind != "phase", span.begin_s)))


def _phase_span(record: np.void, offset_s: float) -> TimelineSpan:
    return TimelineSpan(
        kind="phase",
        name=display_name(Phase, int(record["code"])),
        begin_s=record["enqueued_s"] + offset_s,
        end_s=_end(record, offset_s),
        facts={},
    )


def _operation_span(
    record: np.void, communicators: Mapping[int, Communicator], offset_s: float
) -> TimelineSpan:
    group = communicators.get(int(record["communicator"]))
    facts: dict[str, str | int] = {
        "group": group.name if group else f"{int(record['communicator']):08x}",
        "number": int(record["number"]),
        "nbytes": int(record["nbytes"]),
        "dtype": DTYPES[record["dtype"]] if record["dtype"] < len(DTYPES) else "other",
    }
    if record["peer"] >= 0:
        facts["peer"] = int(record["peer"])
    if record["flags"] & Flag.FAILED:
        facts["failed"] = "yes"
    if record["flags"] & Flag.UNOBSERVED:
        facts["end"] = "not observed"
    if record["started_s"] > record["enqueued_s"]:
        facts["queued_us"] = int((record["started_s"] - record["enqueued_s"]) * 1e6)
    return TimelineSpan(
        kind="operation",
        name=display_name(Operation, int(record["code"])),
        begin_s=float(arrival_times(record)) + offset_s,
        end_s=_end(record, offset_s),
        facts=facts,
    )


def _end(record: np.void, offset_s: float) -> float | None:
    if record["ended_s"] > 0:
        return float(record["ended_s"]) + offset_s
    # Of an operation whose end cannot be seen only the call is known.
    return float(record["enqueued_s"]) + offset_s if record["flags"] & Flag.UNOBSERVED else None


def display_name(kind: type[Phase] | type[Operation], code: int) -> str:
    """Return the name of a phase or an operation for people, also of an unknown one."""
    try:
        return kind(code).name.lower().replace("_", " ")
    except ValueError:
        return f"unknown {code}"
