"""Builds the JSON values of a watch for the web page, the terminal and scripts.

Called on the thread that owns the watch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.records import (
    Communicator,
    Ending,
    Kind,
    Measure,
    Operation,
    Phase,
    RankRecords,
    arrival_times,
)
from keepstep.monitor.telemetry.record_history import RankHistory
from keepstep.monitor.watch.goodput import goodput
from keepstep.monitor.watch.job_events import JobEvent
from keepstep.monitor.watch.matrices import delays, present_waits
from keepstep.monitor.watch.step_times import (
    TimelineSpan,
    display_name,
    newest_step,
    stand_still_in,
    timeline,
)
from keepstep.monitor.watch.verdict_log import VerdictEntry
from keepstep.monitor.watch.watch import Watch

_UNHEARD_S = 5.0
"""A rank without a reading for so long has an unknown state: its node's daemon, or one on the way,
does not answer."""
_QUIET_S, _QUIET_STEPS = 5.0, 5.0
"""A standstill of all ranks that is longer than this, and than so many steps, is shown as one."""
_MOST_RANKS = 4096
"""Greatest number of ranks in an overview: those without progress for the longest time."""
_MOST_RANKS_IN_MATRICES = 1024
"""If there are more, every second, third and so on: a row stands for several ranks anyway."""
_LONG_WAIT_S, _LONG_WAIT_STEPS = 3.0, 3.0
"""Waits are shown as present ones beyond this many seconds, and this many steps' time."""
_NEWEST_IN_MATRICES, _MOST_IN_MATRICES = 512, 1 << 17
"""Operations of each rank, and of all together: copying these takes some milliseconds."""


def overview(
    watch: Watch,
    job: str,
    job_status: JobStatus | None,
    recorded: Callable[[], Sequence[str]],
    events: Sequence[JobEvent] = (),
    other_pages: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the ranks and their activity, the nodes, and the verdicts that hold or held.

    Args:
        watch: the daemon's.
        job: its name.
        job_status: of the job's runtime.
        recorded: returns the jobs recorded on this node; called if no rank of this job is known.
        events: what happened to the job.
        other_pages: URLs of the pages of other jobs on this node.
    """
    now_s = time.time()
    histories = watch.rank_views.ranks()
    total = len(histories)
    if total > _MOST_RANKS:
        most_silent = sorted(histories, key=_silent_s, reverse=True)[:_MOST_RANKS]
        histories = sorted(most_silent, key=lambda history: history.state.rank)
    ranks = [_rank_json(watch, history) for history in histories]
    typical_step_s = watch.rank_views.typical_step_s()
    own_node = watch.nodes.get(watch.node)
    return {
        "job": job,
        "node": watch.node,
        "now_s": now_s,
        "incarnation": watch.incarnation,
        "diagnoses": watch.diagnoses,
        "monitor_cpu_s": own_node.monitor_cpu_s if own_node else 0.0,
        "faults": dict(watch.faults),
        "ranks_total": total,
        "absence": None if total else no_ranks_text(job, recorded()),
        "ranks": ranks,
        "nodes": [
            {**asdict(facts), "age_s": max(0.0, now_s - facts.wall_s)}
            for facts in watch.nodes.values()
        ],
        "missing": dict(watch.child_registry.missing),
        "typical_step_s": typical_step_s,
        "pace": _pace(watch, histories, job_status, now_s),
        "reported": reported(histories, typical_step_s),
        "other_pages": dict(other_pages or {}),
        "events": [asdict(event) for event in events],
        "verdicts": [_entry_json(watch, entry, now_s) for entry in reversed(watch.log.entries)],
        "notes": [note.to_json() for note in watch.log.notes_in_force(now_s)],
        "job_status": job_status_json(job_status, typical_step_s),
    }


def _entry_json(watch: Watch, entry: VerdictEntry, wall_s: float) -> dict[str, Any]:
    """Return a verdict, with the note of a person on it while it holds."""
    holds = entry.closed_at_s is None
    note = watch.log.note_on(entry.verdict, wall_s) if holds else None
    return {**entry.to_json(), "note": None if note is None else note.to_json()}


def reported(
    histories: Sequence[RankHistory], typical_step_s: float | None
) -> dict[str, float | None]:
    """Return what the loop reports: loss, gradient norm, tokens per second; None if it does not."""
    tokens = _newest(histories, Measure.TOKENS)
    return {
        "loss": _median(_newest(histories, Measure.LOSS)),
        "gradient_norm": _median(_newest(histories, Measure.GRADIENT_NORM)),
        "tokens_per_s": sum(tokens) / typical_step_s if tokens and typical_step_s else None,
    }


def _newest(histories: Sequence[RankHistory], measure: Measure) -> list[float]:
    values = [history.newest_measure(measure) for history in histories]
    return [value for value in values if value is not None and math.isfinite(value)]


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _pace(
    watch: Watch, histories: Sequence[RankHistory], status: JobStatus | None, wall_s: float
) -> dict[str, Any]:
    """Return how the job moves now: a name for people, and for how many seconds, if it is known.

    What a step usually takes is said only of a job that takes steps.
    """
    typical_s = watch.rank_views.typical_step_s()
    hangs = [e.since_s for e in watch.log.holding if e.verdict.cost_s_per_step == math.inf]
    silent_s = min((_silent_s(history) for history in histories), default=0.0)
    is_over = bool(histories) and not any(history.state.is_alive for history in histories)
    last = status.recoveries[-1] if status is not None and status.recoveries else None
    name, seconds = "a step takes", typical_s
    if status is not None and status.paused:
        name, seconds = "paused for", wall_s - status.paused_at_s
    elif status is not None and status.changing:
        name, seconds = "changes members", None
    elif last is not None and not last.stepped_at_s:
        name, seconds = "recovers for", wall_s - last.detected_at_s
    elif hangs:
        name, seconds = "stands still for", wall_s - min(hangs)
    elif is_over:
        is_done = all(history.state.ending == Ending.FINISHED for history in histories)
        name, seconds = "ended" if is_done else "its ranks are gone", None
    elif silent_s > max(_QUIET_S, _QUIET_STEPS * (typical_s or 0.0)):
        name, seconds = "no progress for", silent_s
    return {"name": name, "seconds": seconds}


def no_ranks_text(job: str, recorded: Sequence[str]) -> str:
    """Return the message for a job without known ranks: its name may be wrong."""
    others = (
        f"recorded on this node: {', '.join(recorded)}"
        if recorded
        else "no job is recorded on this node"
    )
    return f"no rank of job {job} is known yet; {others}"


def job_status_json(
    job_status: JobStatus | None, typical_step_s: float | None
) -> dict[str, Any] | None:
    """Return the job's status with its goodput; None if keepstep does not run the job."""
    if job_status is None:
        return None
    account = goodput(job_status.recoveries, job_status.began_at_s, time.time(), typical_step_s)
    return {
        **asdict(job_status),
        "goodput": {"wall_s": account.wall_s, "share": account.share, "parts": account.parts},
    }


def heat(watch: Watch, columns: int, rows: int, phase: Phase) -> dict[str, Any]:
    """Return durations of steps or of one phase of them, ranks by steps, and their median."""
    heat_map = watch.rank_views.heat(columns, rows, phase)
    finite_s = heat_map.seconds[np.isfinite(heat_map.seconds)]
    return {
        "steps": heat_map.steps,
        "rows": heat_map.rows,
        "seconds": _numbers(heat_map.seconds),
        "typical_s": float(np.median(finite_s)) if finite_s.size else None,
    }


@dataclass(frozen=True, slots=True)
class MatrixInputs:
    """Holds the input of `delay_matrices`: copies, in bounded number.

    Args:
        ranks: their newest operations.
        communicators: of the job.
        long_s: a wait that has lasted longer is shown instead of past ones.
    """

    ranks: Mapping[int, RankRecords]
    communicators: Mapping[int, Communicator]
    long_s: float


def operations_for_matrices(watch: Watch) -> MatrixInputs:
    """Return what `delay_matrices` is computed from."""
    ranks = [history.state.rank for history in watch.rank_views.ranks()]
    ranks = ranks[:: math.ceil(len(ranks) / _MOST_RANKS_IN_MATRICES) or 1]
    newest = min(_NEWEST_IN_MATRICES, _MOST_IN_MATRICES // max(1, len(ranks)))
    return MatrixInputs(
        watch.rank_views.newest_operations(ranks, newest),
        dict(watch.rank_views.communicators),
        max(_LONG_WAIT_S, _LONG_WAIT_STEPS * (watch.rank_views.typical_step_s() or 0.0)),
    )


def delay_matrices(inputs: MatrixInputs, rows: int) -> dict[str, Any]:
    """Return how long ranks wait for each other, and how long messages between them take.

    If ranks wait for long now, the waits are those so far, and the others are left out: means of
    the past would hide them. It takes long, and may be called on any thread.
    """
    matrices = delays(inputs.ranks, rows)
    present = present_waits(inputs.ranks, inputs.communicators, matrices.rows)
    is_long = bool((present > inputs.long_s).any())
    return {
        "rows": matrices.rows,
        "waits_now": is_long,
        "waiting": _numbers(present if is_long else matrices.waiting),
        "transfer": _numbers(matrices.transfer),
    }


def step_timeline(
    watch: Watch, step: int | None, ranks: Sequence[int], limit: int
) -> dict[str, Any]:
    """Return what ranks did in a step; times count from its first instant.

    Args:
        watch: the daemon's.
        step: its number; None for that of `newest_step`.
        ranks: to include.
        limit: operations of each rank, at most.
    """
    progress = watch.rank_views.progress()
    number = step if step is not None else newest_step(progress) or 0
    include_later_open = stand_still_in(progress, number)
    chosen = watch.rank_views.records_of_step(ranks, number, include_later_open=include_later_open)
    until_s = max((records.read_at_s + records.offset_s for records in chosen.values()), default=0)
    spans_of = timeline(
        chosen,
        watch.rank_views.communicators,
        number,
        limit,
        include_later_open=include_later_open,
    )
    begin_s = min((span.begin_s for spans in spans_of.values() for span in spans), default=0.0)
    return {
        "step": number,
        "until_s": max(until_s - begin_s, 0.0),
        "ranks": [
            {"rank": rank, "spans": [_span_json(span, begin_s) for span in spans]}
            for rank, spans in sorted(spans_of.items())
        ],
    }


def _span_json(span: TimelineSpan, begin_s: float) -> dict[str, Any]:
    return {
        "kind": span.kind,
        "name": span.name,
        "begin_s": span.begin_s - begin_s,
        "end_s": None if span.end_s is None else span.end_s - begin_s,
        "facts": dict(span.facts),
    }


def _rank_json(watch: Watch, history: RankHistory) -> dict[str, Any]:
    """Return a rank's state and current activity; ages are in seconds."""
    state, table = history.state, watch.rank_views.tables[history.state.rank]
    open_records = history.open_records()
    is_phase = (open_records["kind"] == Kind.PHASE) & (open_records["code"] != Phase.STEP)
    phases = open_records[is_phase]
    operations = open_records[open_records["kind"] == Kind.OPERATION]
    unheard_s = watch.rank_views.silence_s(state.rank)
    return {
        "rank": state.rank,
        "node": state.node,
        "pid": state.pid,
        "is_alive": state.is_alive,
        "ending": state.ending.name.lower(),
        "step": history.highest_step,
        "silent_s": _silent_s(history),
        "phase": _phase_json(phases[-1], state.read_at_s) if len(phases) else None,
        "operation": (
            _operation_json(watch, operations[0], state.read_at_s) if len(operations) else None
        ),
        "last_step": table.last_step,
        "last_step_s": table.last_step_s or None,
        "unheard_s": unheard_s,
        "state": _state_name(state.is_alive, unheard_s),
    }


def _silent_s(history: RankHistory) -> float:
    """Return for how long a rank has made no progress."""
    return max(0.0, history.state.read_at_s - history.state.progress_at_s)


def _phase_json(record: np.void, now_s: float) -> dict[str, Any]:
    return {
        "name": display_name(Phase, int(record["code"])),
        "age_s": now_s - float(record["enqueued_s"]),
    }


def _operation_json(watch: Watch, record: np.void, now_s: float) -> dict[str, Any]:
    return {
        "name": display_name(Operation, int(record["code"])),
        "group": watch.rank_views.group_name(int(record["communicator"])),
        "number": int(record["number"]),
        "age_s": now_s - float(arrival_times(record)),
    }


def _state_name(is_alive: bool, unheard_s: float) -> str:
    if not is_alive:
        return "gone"
    return "unheard" if unheard_s > _UNHEARD_S else "alive"


def _numbers(cells: np.ndarray) -> list[list[float | None]]:
    """Return cells as JSON numbers with six significant digits; NaN as null."""
    return [
        [None if math.isnan(cell) else float(f"{cell:.6g}") for cell in row]
        for row in cells.tolist()
    ]
