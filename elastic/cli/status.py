"""What a person sees of a running job: one rendering of the view, for `keepstep status` and for the end of a demo."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keepstep.elastic.rendezvous.intervals import AUTO, checkpoint_interval_s, failures_per_s
from keepstep.elastic.rendezvous.records import Recovery
from keepstep.elastic.rendezvous.view import View


def summary(view: View, wall_s: float) -> dict[str, Any]:
    """Return the state of a job as JSON, at a wall-clock time in seconds."""
    generation = view.generation
    return {
        "generation": view.generation_number,
        "closing": view.closing.reason if view.is_closing and view.closing else None,
        "world_size": generation.world_size if generation else 0,
        "leader": view.leader,
        "parity": generation.parity if generation else 0,
        "step": max((joined.record.step for joined in view.nodes.values()), default=0),
        "snapshot": msgspec.to_builtins(view.snapshot.snapshot) if view.snapshot else None,
        "checkpoint": view.checkpoint.to_json() if view.checkpoint else None,
        "nodes": [
            {
                "node": node,
                "host": joined.record.host,
                "phase": joined.record.phase.value,
                "ranks": _ranks(view, node),
                "group": _group(view, node),
                "step": joined.record.step,
                "leaving": joined.record.leaving,
                "snapshot_memory_nbytes": joined.record.memory_nbytes,
            }
            for node, joined in sorted(view.nodes.items())
        ],
        "intervals": _intervals(view, wall_s),
        "verdicts": [verdict.to_json() for verdict in view.current_verdicts],
        "verdicts_omitted": view.verdicts.omitted if view.verdicts and view.current_verdicts else 0,
        "verdicts_at_s": view.verdicts.at_s if view.verdicts and view.current_verdicts else None,
        "recoveries": [recovery.to_json() for recovery in view.history.recoveries],
        "result": view.result.to_json() if view.result else None,
    }


def render(job: str, view: View, wall_s: float) -> RenderableType:
    """Return the state of a job for a terminal, at a wall-clock time in seconds."""
    facts = summary(view, wall_s)
    snapshot, stored = view.snapshot, view.checkpoint
    lines = [
        f"job {job}   generation {facts['generation']}   ranks {facts['world_size']}   step {facts['step']}",
        f"last committed snapshot: {f'step {snapshot.snapshot.step}' if snapshot else 'none'}",
        f"last stored checkpoint:  {f'step {stored.step} in {stored.url}' if stored else 'none'}",
    ]
    if facts["world_size"]:
        groups = len({node["group"] for node in facts["nodes"] if node["group"] is not None})
        survives = f"{facts['parity']} node{'s' if facts['parity'] != 1 else ''}"
        lines.append(
            f"memory survives the loss of:  {survives}{' of each group' if groups > 1 else ''}"
        )
    lines += _describe_intervals(facts["intervals"])
    if facts["closing"]:
        lines.append(f"changing membership: {facts['closing']}")
    nodes = Table(box=box.SIMPLE_HEAD)
    for name in ("node", "host", "ranks", "phase", "step", "snapshots"):
        nodes.add_column(name)
    for node in facts["nodes"]:
        leads = " *" if node["node"] == facts["leader"] else ""
        nodes.add_row(
            Text(node["node"] + leads),
            node["host"],
            node["ranks"],
            "leaving" if node["leaving"] else node["phase"],
            str(node["step"]),
            f"{node['snapshot_memory_nbytes'] / 2**20:.1f} MiB",
        )
    parts: list[RenderableType] = [Text("\n".join(lines)), nodes]
    if view.current_verdicts:
        parts.append(Text(verdicts(view, wall_s)))
    if view.history.recoveries:
        parts.append(recoveries(view.history.recoveries))
    return Group(*parts)


def verdicts(view: View, wall_s: float) -> str:
    """Return the monitor's verdicts that hold, with evidence and cost, one block of lines each."""
    assert view.verdicts is not None
    lines = [
        f"the monitor says, as of {time.strftime('%H:%M:%S', time.localtime(view.verdicts.at_s))}:"
    ]
    for one in view.current_verdicts:
        cost = (
            "the job stands still"
            if one.cost_s_per_step is None
            else f"costs {one.cost_s_per_step:.2g} s a step"
        )
        lines.append(
            f"  {one.subject}: {one.syndrome}, for {max(0.0, wall_s - one.since_s):.0f} s; {cost}; "
            f"sure to {one.confidence:.0%}; advice: {one.advice}"
        )
        lines += [f"    {line}" for line in one.evidence]
    if view.verdicts.omitted:
        lines.append(f"  and {view.verdicts.omitted} more, see the monitor's page")
    return "\n".join([*lines, ""])


def recoveries(history: Sequence[Recovery]) -> Table:
    """Return the changes of generation as a table: when each phase ended, in seconds after detection."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title="recoveries: seconds from detection to members settled, processes ready, state restored, first step done",
        title_justify="left",
    )
    columns = (
        "reason",
        "ranks",
        "detected",
        "members",
        "ready",
        "state",
        "stepped",
        "step",
        "lost",
        "from",
    )
    for name in columns:
        table.add_column(name, no_wrap=name != "reason", min_width=8 if name == "reason" else None)
    for recovery in history:
        began = recovery.detected_at_s
        table.add_row(
            # Plain text: what gloo says begins with a path in brackets, which would be taken for markup.
            Text(recovery.reason.splitlines()[0] if recovery.reason else ""),
            str(recovery.world_size),
            time.strftime("%H:%M:%S", time.localtime(began)),
            *(
                f"{at_s - began:.2f}"
                for at_s in (
                    recovery.opened_at_s,
                    recovery.ready_at_s,
                    recovery.restored_at_s,
                    recovery.stepped_at_s,
                )
            ),
            str(recovery.resumed_step),
            str(recovery.lost_steps),
            # One below the other, and short: a terminal may have 80 columns.
            recovery.source.replace("peers' memory", "peers'").replace(", ", ",\n"),
        )
    return table


def _intervals(view: View, wall_s: float) -> dict[str, Any]:
    """Return the intervals that the job chooses by itself, with what goes into them; null for what it was told."""
    records = [joined.record for joined in view.nodes.values()]
    nodes = len(view.generation.members) if view.generation else 0
    chooses = any(record.checkpoint_every == AUTO for record in records)
    # The slowest to want a snapshot decides for all.
    every, cost_s = max(((r.snapshot_every, r.snapshot_cost_s) for r in records), default=(0, 0.0))
    return {
        "failures_per_s": failures_per_s(view.history.recoveries, nodes, wall_s) if nodes else None,
        "snapshot_every": every or None,
        "snapshot_cost_s": cost_s if every else None,
        "checkpoint_interval_s": checkpoint_interval_s(view, wall_s)
        if chooses and view.checkpoint
        else None,
        "checkpoint_cost_s": view.checkpoint.took_s if chooses and view.checkpoint else None,
    }


def _describe_intervals(intervals: Mapping[str, Any]) -> list[str]:
    """Return the choices in words, with the formula behind them."""
    if not intervals["failures_per_s"]:
        return []
    apart_h = 1 / intervals["failures_per_s"] / 3600
    lines = []
    if intervals["snapshot_every"]:
        cost = f"{intervals['snapshot_cost_s'] * 1e3:.1f} ms"
        lines.append(
            f"snapshots, chosen:    every {intervals['snapshot_every']} steps, of sqrt(2 * {cost} * {apart_h:.1f} h)"
        )
    if intervals["checkpoint_interval_s"]:
        cost, minutes = (
            f"{intervals['checkpoint_cost_s']:.1f} s",
            intervals["checkpoint_interval_s"] / 60,
        )
        lines.append(
            f"checkpoints, chosen:  every {minutes:.1f} min, of sqrt(2 * {cost} * {apart_h:.1f} h)"
        )
    return (
        [*lines, "                      (cost each, time between failures of the job)"]
        if lines
        else []
    )


def _group(view: View, node: str) -> int | None:
    member = view.generation.member(node) if view.generation else None
    return member.group if member else None


def _ranks(view: View, node: str) -> str:
    member = view.generation.member(node) if view.generation else None
    if member is None:
        return "spare"
    last = member.first_rank + member.nproc - 1
    return str(member.first_rank) if last == member.first_rank else f"{member.first_rank}-{last}"
