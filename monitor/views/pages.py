"""What the web page, the terminal and scripts read of a watch, as JSON values. Called on the thread that owns the watch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.records import Operation, Phase
from keepstep.monitor.watch.goodput import goodput
from keepstep.monitor.watch.step_times import TimelineSpan
from keepstep.monitor.watch.watch import Watch, activity

_UNHEARD_S = 5.0
"""Whoever was not heard of for so long is not said to be alive: its node's daemon, or one on the way, is gone, and nobody knows."""
_MOST_RANKS = 4096
"""An overview names no more ranks than this, the most silent first: nobody reads 80,000 rows."""


def overview(
    watch: Watch, job: str, job_status: JobStatus | None, recorded: Callable[[], Sequence[str]]
) -> dict[str, Any]:
    """Return who is there, what each rank is doing, and what verdicts hold or held.

    Args:
        watch: that is asked.
        job: its name.
        job_status: what the job's runtime knows.
        recorded: tells the jobs that are recorded on this node; asked where no rank of this one is.
    """
    now_s = time.time()
    ranks = [_named(activity(kept), watch) for kept in watch.ranks()]
    total = len(ranks)
    if total > _MOST_RANKS:
        ranks = sorted(
            sorted(ranks, key=lambda told: -told["silent_s"])[:_MOST_RANKS],
            key=lambda told: told["rank"],
        )
    for told in ranks:
        table = watch.tables[told["rank"]]
        told["last_step"], told["last_step_s"] = table.last_step, table.last_step_s or None
        told["unheard_s"] = watch.silence_s(told["rank"])
        told["state"] = (
            "gone"
            if not told["is_alive"]
            else "unheard"
            if told["unheard_s"] > _UNHEARD_S
            else "alive"
        )
    own = watch.nodes.get(watch.node)
    return {
        "job": job,
        "node": watch.node,
        "now_s": now_s,
        "incarnation": watch.incarnation,
        "diagnoses": watch.diagnoses,
        "monitor_cpu_s": own.monitor_cpu_s if own else 0.0,
        "faults": dict(watch.faults),
        "ranks_total": total,
        "absence": None if total else no_ranks_text(job, recorded()),
        "ranks": ranks,
        "nodes": [
            {**asdict(facts), "age_s": max(0.0, now_s - facts.wall_s)}
            for facts in watch.nodes.values()
        ],
        "missing": dict(watch.child_registry.missing),
        "typical_step_s": watch.typical_step_s(),
        "verdicts": [entry.to_json() for entry in reversed(watch.log.entries)],
        "job_status": job_status_json(watch, job_status),
    }


def no_ranks_text(job: str, recorded: Sequence[str]) -> str:
    """Return what to say where no rank of a job is heard of: its name may be another."""
    others = (
        f"recorded on this node: {', '.join(recorded)}"
        if recorded
        else "no job is recorded on this node"
    )
    return f"no rank of job {job} is heard of yet; {others}"


def job_status_json(watch: Watch, job_status: JobStatus | None) -> dict[str, Any] | None:
    """Return what the job's runtime knows, with the account of its time; None if keepstep does not run the job."""
    if job_status is None:
        return None
    account = goodput(
        job_status.recoveries, job_status.began_at_s, time.time(), watch.typical_step_s()
    )
    return {
        **asdict(job_status),
        "goodput": {"wall_s": account.wall_s, "share": account.share, "parts": account.parts},
    }


def heat(watch: Watch, columns: int, rows: int, phase: Phase) -> dict[str, Any]:
    """Return times of steps or of one part of them, ranks by steps, and their median."""
    shown = watch.heat(columns, rows, phase)
    known = shown.seconds[np.isfinite(shown.seconds)]
    return {
        "steps": shown.steps,
        "rows": shown.rows,
        "seconds": _numbers(shown.seconds),
        "typical_s": float(np.median(known)) if known.size else None,
    }


def delay_matrices(watch: Watch, rows: int) -> dict[str, Any]:
    """Return who waits for whom and how long messages take."""
    shown = watch.delays(rows)
    return {
        "rows": shown.rows,
        "waiting": _numbers(shown.waiting),
        "transfer": _numbers(shown.transfer),
    }


def step_timeline(
    watch: Watch, step: int | None, ranks: Sequence[int], limit: int
) -> dict[str, Any]:
    """Return what ranks did in a step; times count from its first instant."""
    chosen, until_s, spans = watch.timeline(step, ranks, limit)
    begin_s = min((span.begin_s for told in spans.values() for span in told), default=0.0)
    return {
        "step": chosen,
        "until_s": max(until_s - begin_s, 0.0),
        "ranks": [
            {"rank": rank, "spans": [_span(span, begin_s) for span in told]}
            for rank, told in sorted(spans.items())
        ],
    }


def _span(span: TimelineSpan, begin_s: float) -> dict[str, Any]:
    return {
        "kind": span.kind,
        "name": span.name,
        "begin_s": span.begin_s - begin_s,
        "end_s": None if span.end_s is None else span.end_s - begin_s,
        "facts": dict(span.facts),
    }


def _named(told: dict[str, Any], watch: Watch) -> dict[str, Any]:
    """Replace codes by names."""
    phase, operation = told["phase"], told["operation"]
    if phase is not None:
        code = phase.pop("code")
        phase["name"] = (
            Phase(code).name.lower().replace("_", " ") if code in set(Phase) else f"unknown {code}"
        )
    if operation is not None:
        code, identity = operation.pop("code"), operation.pop("communicator")
        known = code in set(Operation)
        operation["name"] = (
            Operation(code).name.lower().replace("_", " ") if known else f"unknown {code}"
        )
        operation["group"] = watch.group_name(identity)
    return told


def _numbers(cells: np.ndarray) -> list[list[float | None]]:
    """Return cells as JSON numbers with six significant digits; what is not known is null."""
    return [
        [None if math.isnan(cell) else float(f"{cell:.6g}") for cell in row]
        for row in cells.tolist()
    ]
