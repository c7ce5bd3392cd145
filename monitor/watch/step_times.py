"""What each rank's steps took, and where the time of one step went: pure functions and small tables over records.

The table is fed with records as they end, so a monitor can show many more steps than it keeps records of. A step's whole
time is that of its `STEP` phase; the other phases are parts of it and may be missing where nobody marks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
)
from keepstep.monitor.telemetry.record_history import ChangedRecords

_PHASES = len(Phase)
_STUCK = 3.0


class StepTable:
    """Seconds per phase of one rank's newest `capacity` steps.

    The whole of a step that is done again replaces what it took before; what its parts took is added up over the attempts.
    """

    def __init__(self, capacity: int) -> None:
        self._step = np.zeros(capacity, np.int64)
        self._seconds = np.zeros((capacity, _PHASES), np.float32)
        self.last_step = 0
        self.last_step_s = 0.0

    def feed(self, changed: ChangedRecords) -> None:
        """Take in records that are new or have changed; only phases that have ended count, and what one was prolonged by."""
        records = changed.records
        counted = (records["kind"] == Kind.PHASE) & (records["ended_s"] > 0) & (records["step"] > 0)
        counted &= records["code"] < _PHASES
        # As plain numbers: a structured array's rows are slow to take apart one by one.
        told = records.compress(counted)
        columns = (
            told["step"],
            told["code"],
            told["enqueued_s"],
            changed.ended_before_s[counted],
            told["ended_s"],
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

    def seconds(self, steps: Sequence[int]) -> np.ndarray:
        """Return seconds by step and phase, shape [steps, phases]; not a number where a step is not known."""
        wanted = np.asarray(steps, np.int64)
        slots = wanted % len(self._step)
        known = (self._step[slots] == wanted) & (self._seconds[slots, Phase.STEP] > 0)
        return np.where(known[:, None], self._seconds[slots], np.nan)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Step times of ranks over steps.

    Args:
        steps: the columns.
        rows: the ranks that each row stands for; more than one where there are more ranks than rows.
        seconds: shape [rows, steps]; the slowest rank's of the row, not a number where nothing is known.
    """

    steps: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    seconds: np.ndarray


def heat_map(
    tables: Mapping[int, StepTable], columns: int, rows: int, phase: Phase = Phase.STEP
) -> HeatMap:
    """Return the newest `columns` steps of all ranks, whole or one part of them, in at most `rows` rows of neighbouring ranks."""
    last = max((table.last_step for table in tables.values()), default=0)
    steps = tuple(range(max(1, last - columns + 1), last + 1))
    ranks = sorted(tables)
    if not ranks or not steps:
        return HeatMap((), (), np.empty((0, 0)))
    per_row = -(-len(ranks) // rows)
    grouped = tuple(
        tuple(ranks[first : first + per_row]) for first in range(0, len(ranks), per_row)
    )
    cells = np.full((len(grouped), len(steps)), np.nan)
    for row, members in enumerate(grouped):
        cells[row] = np.fmax.reduce([tables[rank].seconds(steps)[:, phase] for rank in members])
    if phase != Phase.STEP and not np.nanmax(cells, initial=0.0) > 0:
        cells[:] = np.nan  # Nobody marks it, which is not the same as its taking no time.
    return HeatMap(steps, grouped, cells)


def typical_step_s(tables: Mapping[int, StepTable], steps: int = 50) -> float | None:
    """Return the median over the newest steps of the slowest rank's seconds; None before the first step."""
    shown = heat_map(tables, steps, 1)
    known = shown.seconds[np.isfinite(shown.seconds)]
    return float(np.median(known)) if known.size else None


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One bar of a timeline: what, from when to when by the job's clock (`end_s` None: still under way), and what to tell of it."""

    kind: str
    name: str
    begin_s: float
    end_s: float | None
    facts: Mapping[str, str | int]


def newest_step(ranks: Mapping[int, RankRecords]) -> int | None:
    """Return the newest step that every rank has ended; where there is none, or ranks stand still, the step of who is furthest behind."""
    ended = [int(marks["step"].max()) for marks in map(_ended_steps, ranks.values()) if len(marks)]
    if ended and len(ended) == len(ranks) and not _stand_still(ranks):
        return min(ended)
    return _furthest_behind(ranks)


def stand_still_in(ranks: Mapping[int, RankRecords], step: int) -> bool:
    """Return whether ranks stand still and whoever is furthest behind does so in this step."""
    return _stand_still(ranks) and step == _furthest_behind(ranks)


def _ended_steps(told: RankRecords) -> np.ndarray:
    records = told.records
    is_step = (records["kind"] == Kind.PHASE) & (records["code"] == Phase.STEP)
    ended: np.ndarray = records[is_step & (records["ended_s"] > 0)]
    return ended


def _stand_still(ranks: Mapping[int, RankRecords]) -> bool:
    """Return whether what comes after some rank's last whole step takes far longer than that did."""
    for told in ranks.values():
        marks = _ended_steps(told)
        if (
            len(marks)
            and told.read_at_s - marks["ended_s"][-1]
            > _STUCK * (marks["ended_s"] - marks["enqueued_s"])[-1]
        ):
            return True
    return False


def _furthest_behind(ranks: Mapping[int, RankRecords]) -> int | None:
    """Return the lowest of the ranks' newest steps; of who has died only where that is at most a step before those of the living."""
    newest = {
        rank: int(told.records["step"].max(initial=0))
        for rank, told in ranks.items()
        if told.ending != Ending.FINISHED
    }
    living = [step for rank, step in newest.items() if step and ranks[rank].is_alive]
    if not living:
        return max(newest.values(), default=0) or None
    return min([*living, *(step for step in newest.values() if step >= min(living) - 1 > 0)])


def timeline(
    ranks: Mapping[int, RankRecords],
    communicators: Mapping[int, Communicator],
    step: int,
    limit: int,
    *,
    to_the_end: bool = False,
) -> dict[int, tuple[TimelineSpan, ...]]:
    """Return what every rank did in one step: phases, and the `limit` longest operations of each rank in order of time.

    With `to_the_end` also what ranks that are in a later step have under way there.
    """
    return {
        rank: _spans(told, communicators, step, limit, to_the_end)
        for rank, told in sorted(ranks.items())
    }


def _spans(
    told: RankRecords,
    communicators: Mapping[int, Communicator],
    step: int,
    limit: int,
    to_the_end: bool,
) -> tuple[TimelineSpan, ...]:
    records = told.records
    later = (
        (records["step"] > step) & (records["ended_s"] <= 0)
        if to_the_end
        else np.zeros(len(records), bool)
    )
    records = records[(records["step"] == step) | later]
    phases = records[records["kind"] == Kind.PHASE]
    operations = records[records["kind"] == Kind.OPERATION]
    if len(operations) > limit:
        until_s = np.where(operations["ended_s"] > 0, operations["ended_s"], told.read_at_s)
        longest = np.argsort(until_s - operations["enqueued_s"])[-limit:]
        operations = operations[np.sort(longest)]
    spans = [_phase_span(record, told.offset_s) for record in phases]
    spans += [_operation_span(record, communicators, told.offset_s) for record in operations]
    return tuple(sorted(spans, key=lambda span: (span.kind != "phase", span.begin_s)))


def _phase_span(record: np.void, offset_s: float) -> TimelineSpan:
    name = _name(Phase, int(record["code"]))
    return TimelineSpan("phase", name, record["enqueued_s"] + offset_s, _end(record, offset_s), {})


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
    if record["started_s"] > record["enqueued_s"]:
        facts["queued_us"] = int((record["started_s"] - record["enqueued_s"]) * 1e6)
    name = _name(Operation, int(record["code"]))
    return TimelineSpan(
        "operation", name, record["enqueued_s"] + offset_s, _end(record, offset_s), facts
    )


def _end(record: np.void, offset_s: float) -> float | None:
    return float(record["ended_s"]) + offset_s if record["ended_s"] > 0 else None


def _name(kind: type[Phase] | type[Operation], code: int) -> str:
    try:
        return kind(code).name.lower().replace("_", " ")
    except ValueError:
        return f"unknown {code}"
