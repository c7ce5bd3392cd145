"""Renders the view of a job as JSON and for a terminal, for `keepstep status` and the demo."""

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
from keepstep.elastic.rendezvous.loss_forecast import age
from keepstep.elastic.rendezvous.records import Member, Recovery, SnapshotCommit
from keepstep.elastic.rendezvous.view import View


def summary(view: View, wall_s: float) -> dict[str, Any]:
    """Return the state of a job as JSON, at a wall-clock time in seconds.

    `snapshot_at_s` is the wall-clock time at which `snapshot` was reported to the coordinator.
    """
    generation = view.generation
    places = {member.node: member for member in generation.members} if generation else {}
    # Nodes report their steps to the coordinator every few seconds, and snapshots at once.
    committed = view.snapshot.snapshot.step if view.snapshot else 0
    return {
        "generation": view.generation_number,
        "closing": view.closing.reason if view.is_closing and view.closing else None,
        "paused": view.pause.reason if view.pause else None,
        "paused_at_s": view.pause.at_s if view.pause else None,
        "scaled_to": view.scale.to_json() if view.scale else None,
        "world_size": generation.world_size if generation else 0,
        "leader": view.leader,
        "parity": generation.parity if generation else 0,
        "step": max(committed, *(joined.record.step for joined in view.nodes.values()), 0),
        "snapshot": msgspec.to_builtins(view.snapshot.snapshot) if view.snapshot else None,
        "snapshot_at_s": view.snapshot.at_s or None if view.snapshot else None,
        "checkpoint": view.checkpoint.to_json() if view.checkpoint else None,
        "nodes": [
            {
                "node": node,
                "host": joined.record.host,
                "processes": list(joined.record.processes),
                "phase": joined.record.phase.value,
                "ranks": _ranks(places.get(node)),
                "group": places[node].group if node in places else None,
                "step": max(joined.record.step, committed if node in places else 0),
                "leaving": joined.record.leaving,
                "snapshot_memory_nbytes": joined.record.memory_nbytes,
            }
            for node, joined in sorted(view.nodes.items())
        ],
        "intervals": _intervals(view, wall_s),
        "verdicts": [verdict.to_json() for verdict in view.current_verdicts],
        "verdicts_omitted": view.verdicts.omitted if view.verdicts and view.current_verdicts else 0,
        "verdicts_at_s": view.verdicts.at_s if view.verdicts and view.current_verdicts else None,
        "restored_state": _restored_state(view),
        "replicas": _replicas(view),
        "recoveries": [recovery.to_json() for recovery in view.history.recoveries],
        "result": view.result.to_json() if view.result else None,
    }


def render(job: str, view: View, wall_s: float) -> RenderableType:
    """Return the state of a job for a terminal, at a wall-clock time in seconds."""
    state = summary(view, wall_s)
    snapshot, stored = view.snapshot, view.checkpoint
    lines = [
        f"job {job}   generation {state['generation']}   ranks {state['world_size']}   "
        f"step {state['step']}",
        f"last committed snapshot: {_snapshot_age(state['step'], snapshot, wall_s)}",
        f"last stored checkpoint:  {f'step {stored.step} in {stored.url}' if stored else 'none'}",
    ]
    if state["world_size"]:
        groups = len({node["group"] for node in state["nodes"] if node["group"] is not None})
        survives = f"{state['parity']} node{'s' if state['parity'] != 1 else ''}"
        lines.append(
            f"memory survives the loss of:  {survives}{' of each group' if groups > 1 else ''}"
        )
        lines += [
            f"training stands still without {node}, which serves the coordinator"
            for node, joined in view.nodes.items()
            if joined.record.serves_coordinator and len(view.nodes) > 1
        ]
    lines += _describe_restored_state(state["restored_state"])
    lines += _describe_replicas(state["replicas"])
    lines += _describe_intervals(state["intervals"])
    if state["paused"] is not None:
        since = _clock_time(state["paused_at_s"])
        lines.append(f"paused since {since}, `keepstep resume {job}` goes on: {state['paused']}")
    elif state["closing"]:
        lines.append(f"changing membership: {state['closing']}")
    standing = {
        rank
        for verdict in view.current_verdicts
        if verdict.cost_s_per_step is None
        for rank in verdict.ranks
    }
    nodes = Table(box=box.SIMPLE_HEAD)
    for name in ("node", "host", "ranks", "pids", "phase", "step", "snapshots"):
        nodes.add_column(name)
    for node in state["nodes"]:
        leads = " *" if node["node"] == state["leader"] else ""
        nodes.add_row(
            Text(node["node"] + leads),
            node["host"],
            node["ranks"],
            " ".join(map(str, node["processes"])),
            _doing(node, state, standing),
            str(node["step"]),
            f"{node['snapshot_memory_nbytes'] / 2**20:.1f} MiB",
        )
    parts: list[RenderableType] = [Text("\n".join(lines)), nodes]
    if state["leader"] is not None:
        parts.append(Text("* decides for the job\n"))
    if view.current_verdicts:
        parts.append(Text(verdicts(view, wall_s)))
    if view.history.recoveries:
        parts.append(recoveries(view.history.recoveries))
    return Group(*parts)


def _doing(node: Mapping[str, Any], state: Mapping[str, Any], standing: set[int]) -> str:
    """Return what a node does, for people."""
    if node["leaving"]:
        return "leaving"
    if state["paused"] is not None:
        return "paused"
    first, _, last = node["ranks"].partition("-")
    is_member = first.isdigit()
    ranks = range(int(first), int(last or first) + 1) if is_member else range(0)
    return "stands still" if standing.intersection(ranks) else str(node["phase"])


def _snapshot_age(step: int, commit: SnapshotCommit | None, wall_s: float) -> str:
    """Return the snapshot's step, the steps that a recovery would repeat, and the report's age."""
    if commit is None:
        return "none"
    behind = max(0, step - commit.snapshot.step)
    steps = f", {_counted(behind, 'step')} ago" if behind else ""
    reported = f", reported {age(wall_s - commit.at_s)} ago" if commit.at_s else ""
    return f"step {commit.snapshot.step}{steps}{reported}"


def verdicts(view: View, wall_s: float) -> str:
    """Return the monitor's current verdicts as text, with evidence and cost."""
    assert view.verdicts is not None
    lines = [
        f"the monitor's verdicts at {_clock_time(view.verdicts.at_s)}:",
    ]
    for verdict in view.current_verdicts:
        cost = (
            "the job stands still"
            if verdict.cost_s_per_step is None
            else f"costs {verdict.cost_s_per_step:.2g} s per step"
        )
        lines.append(
            f"  {verdict.subject}: {verdict.syndrome}, "
            f"for {max(0.0, wall_s - verdict.since_s):.0f} s; {cost}; "
            f"confidence {verdict.confidence:.0%}; what to do: {verdict.advice}"
        )
        lines += [f"    {line}" for line in verdict.evidence]
    if view.verdicts.omitted:
        lines.append(f"  and {view.verdicts.omitted} more, see the monitor's page")
    return "\n".join([*lines, ""])


def recoveries(history: Sequence[Recovery]) -> RenderableType:
    """Return the changes of generation, each with its reason and outcome."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for recovery in history:
        # As `Text`: gloo's messages begin with a path in brackets, which rich takes for markup.
        reason = f"{recovery.reason.partition(chr(10))[0]}\n{_outcome(recovery)}"
        table.add_row(_clock_time(recovery.detected_at_s), Text(reason))
    return Group(Text("recoveries, in seconds after detection:"), table)


def _outcome(recovery: Recovery) -> str:
    phases = (
        ("members settled", recovery.opened_at_s),
        ("processes ready", recovery.ready_at_s),
        ("state restored", recovery.restored_at_s),
        ("first step done", recovery.stepped_at_s),
    )
    times = ", ".join(f"{name} {at_s - recovery.detected_at_s:.2f}" for name, at_s in phases)
    return (
        f"{_counted(recovery.world_size, 'rank')} from step {recovery.resumed_step} "
        f"({_counted(recovery.lost_steps, 'step')} computed again), from {recovery.source}; {times}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _restored_state(view: View) -> dict[str, Any] | None:
    """Return how the state that nodes restored last compares with its snapshot; None if unknown."""
    comparisons = [
        joined.record.restore_comparison
        for joined in view.nodes.values()
        if joined.record.generation == view.generation_number
        and joined.record.restore_comparison is not None
    ]
    if not comparisons:
        return None
    step = max(comparison.step for comparison in comparisons)
    last = [comparison for comparison in comparisons if comparison.step == step]
    return {
        "step": step,
        "compared_nbytes": sum(comparison.nbytes for comparison in last),
        "differing": sorted({key for comparison in last for key in comparison.differing}),
    }


def _describe_restored_state(state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return []
    comparison = f"differs in {', '.join(state['differing'])}" if state["differing"] else "equal"
    nbytes = f"{state['compared_nbytes'] / 2**20:.1f} MiB"
    return [f"last restored state:     step {state['step']}, {nbytes} compared: {comparison}"]


def _replicas(view: View) -> dict[str, Any] | None:
    """Return how the replicas compared last in this generation; None if there are none."""
    for joined in view.nodes.values():
        comparison = joined.record.replica_comparison
        if comparison is not None and joined.record.generation == view.generation_number:
            return dict(comparison.to_json())
    return None


def _describe_replicas(comparison: Mapping[str, Any] | None) -> list[str]:
    if comparison is None:
        return []
    found = comparison.get("finding") or f"{comparison['replicas']} equal"
    return [f"last compared replicas:  step {comparison['step']}, {found}"]


def _intervals(view: View, wall_s: float) -> dict[str, Any]:
    """Return the intervals that the job chooses, and their inputs; None for fixed ones."""
    records = [joined.record for joined in view.nodes.values()]
    nodes = len(view.generation.members) if view.generation else 0
    chooses_checkpoints = any(record.checkpoint_every == AUTO for record in records)
    # A snapshot needs all ranks, so the longest interval counts.
    every, cost_s = max(
        ((record.snapshot_every, record.snapshot_cost_s) for record in records), default=(0, 0.0)
    )
    checkpoint = view.checkpoint if chooses_checkpoints else None
    return {
        "failures_per_s": failures_per_s(view.history.recoveries, nodes, wall_s) if nodes else None,
        "snapshot_every": every or None,
        "snapshot_cost_s": cost_s if every else None,
        "checkpoint_interval_s": checkpoint_interval_s(view, wall_s) if checkpoint else None,
        "checkpoint_cost_s": checkpoint.took_s if checkpoint else None,
    }


def _describe_intervals(intervals: Mapping[str, Any]) -> list[str]:
    """Return the chosen intervals as lines of text, with their formula."""
    if not intervals["failures_per_s"]:
        return []
    failure_interval_h = 1 / intervals["failures_per_s"] / 3600
    lines = []
    if intervals["snapshot_every"]:
        cost = f"{intervals['snapshot_cost_s'] * 1e3:.1f} ms"
        every = intervals["snapshot_every"]
        lines.append(
            f"snapshots, chosen:    every {'step' if every == 1 else f'{every} steps'}, "
            f"of sqrt(2 * {cost} * {failure_interval_h:.1f} h)"
        )
    if intervals["checkpoint_interval_s"]:
        cost = f"{intervals['checkpoint_cost_s']:.1f} s"
        lines.append(
            f"checkpoints, chosen:  every {intervals['checkpoint_interval_s'] / 60:.1f} min, "
            f"of sqrt(2 * {cost} * {failure_interval_h:.1f} h)"
        )
    if lines:
        lines.append("                      (cost of each, time between failures of the job)")
    return lines


def _clock_time(wall_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall_s))


def _ranks(member: Member | None) -> str:
    if member is None:
        return "standby"
    last = member.first_rank + member.nproc - 1
    return str(member.first_rank) if last == member.first_rank else f"{member.first_rank}-{last}"
