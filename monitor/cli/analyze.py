"""Implements `keepstep monitor analyze`: analyzes Flight Recorder dumps, prints text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepstep.monitor.diagnosis.postmortem import Postmortem, examine
from keepstep.monitor.telemetry.clocks import align
from keepstep.monitor.telemetry.flight_recorder import read_dumps
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.views.events import SERVICE, opened_event
from keepstep.monitor.watch.verdict_log import VerdictEntry

_RANKS = 12


def show(places: Iterable[Path], now_s: float, *, as_json: bool) -> bool:
    """Analyze dumps and print the result; return whether there is any finding.

    Args:
        places: dump files, or directories of them.
        now_s: wall clock.
        as_json: whether to print JSON.

    Raises:
        DumpUnreadable: as `read_dumps`.
    """
    postmortem = examine(align(read_dumps(places)))
    if as_json:
        print(json.dumps(as_object(postmortem, now_s)))
    else:
        Console(highlight=False).print(render(postmortem))
    return bool(postmortem.verdicts or postmortem.waits)


def as_object(postmortem: Postmortem, now_s: float) -> dict[str, Any]:
    """Return the findings as JSON; verdicts as in the event file, opened now."""
    entries = [
        VerdictEntry(
            number=number,
            verdict=verdict,
            since_s=verdict.since_s,
            opened_at_s=now_s,
            reported_at_s=now_s,
        )
        for number, verdict in enumerate(postmortem.verdicts, 1)
    ]
    return {
        "ranks": list(postmortem.ranks),
        "missing": list(postmortem.missing),
        "verdicts": [opened_event(entry, SERVICE) for entry in entries],
        "waits": [
            {
                "operation": wait.operation,
                "waiting": list(wait.waiting),
                "missing": list(wait.missing),
                "since_unix_nano": str(int(wait.since_s * 1e9)),
            }
            for wait in postmortem.waits
        ],
        "remarks": list(postmortem.remarks),
    }


def render(postmortem: Postmortem) -> RenderableType:
    """Return the findings for a terminal."""
    head = f"dumps of {len(postmortem.ranks)} ranks: {_shortened(postmortem.ranks)}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if postmortem.missing:
        parts.append(Text(f"no dump of rank {_shortened(postmortem.missing)}", style="yellow"))
    parts += map(_verdict, postmortem.verdicts)
    if not postmortem.verdicts and postmortem.waits:
        parts.append(Text("no rank can be identified as the cause", style="yellow"))
    elif not postmortem.verdicts:
        parts.append(Text("no fault found", style="green"))
    if postmortem.waits:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("open at the end", "since", "ranks in it", "not in it"):
            table.add_column(name)
        for wait in postmortem.waits:
            since = datetime.fromtimestamp(wait.since_s, UTC).strftime("%H:%M:%S")
            waiting, missing = _shortened(wait.waiting), _shortened(wait.missing)
            table.add_row(Text(wait.operation), since, waiting, missing)
        parts.append(table)
    parts += [Text(remark, style="dim") for remark in postmortem.remarks]
    return Group(*parts)


def _verdict(verdict: Verdict) -> RenderableType:
    line = Text.assemble(
        (
            f"{verdict.syndrome}: {verdict.subject}",
            "bold red" if verdict.cost_s_per_step == float("inf") else "bold dark_orange",
        ),
        f"   confidence {verdict.confidence:.0%}, advice: {verdict.advice}",
    )
    return Group(line, *(Padding(Text(sentence), (0, 0, 0, 2)) for sentence in verdict.evidence))


def _shortened(ranks: Sequence[int]) -> str:
    """Return ranks for people, as runs, at most `_RANKS` of them."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f" and {len(words) - _RANKS} more" if len(words) > _RANKS else ""
    return ", ".join(words[:_RANKS]) + more or "-"
