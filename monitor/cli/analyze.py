"""`keepstep monitor analyze`: what is found in Flight Recorder's dumps, in the terminal or as JSON."""

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
from keepstep.monitor.views.events import found
from keepstep.monitor.watch.verdict_log import VerdictEntry

_RANKS = 12


def show(places: Iterable[Path], now_s: float, *, as_json: bool) -> bool:
    """Print what the dumps tell, and return whether anything is the matter. `now_s` is wall time.

    Raises:
        DumpUnreadable: as `read_dumps`.
    """
    told = examine(align(read_dumps(places)))
    if as_json:
        print(json.dumps(as_object(told, now_s)))
    else:
        Console(highlight=False).print(render(told))
    return bool(told.verdicts or told.waits)


def as_object(told: Postmortem, now_s: float) -> dict[str, Any]:
    """Return what was found as JSON; verdicts as in the event file, told now."""
    return {
        "ranks": list(told.ranks),
        "missing": list(told.missing),
        "verdicts": [
            found(VerdictEntry(number, verdict, verdict.since_s, now_s, now_s))
            for number, verdict in enumerate(told.verdicts, 1)
        ],
        "waits": [
            {
                "operation": wait.operation,
                "waiting": list(wait.waiting),
                "missing": list(wait.missing),
                "since_unix_nano": str(int(wait.since_s * 1e9)),
            }
            for wait in told.waits
        ],
        "remarks": list(told.remarks),
    }


def render(told: Postmortem) -> RenderableType:
    """Return what was found for a terminal."""
    head = f"dumps of {len(told.ranks)} ranks: {_some(told.ranks)}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if told.missing:
        parts.append(Text(f"no dump of rank {_some(told.missing)}", style="yellow"))
    parts += map(_verdict, told.verdicts)
    if not told.verdicts:
        parts.append(
            Text(
                "nothing found" if not told.waits else "nobody can be named",
                style="green" if not told.waits else "yellow",
            )
        )
    if told.waits:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("under way in the end", "since", "ranks in it", "not in it"):
            table.add_column(name)
        for wait in told.waits:
            since = datetime.fromtimestamp(wait.since_s, UTC).strftime("%H:%M:%S")
            table.add_row(Text(wait.operation), since, _some(wait.waiting), _some(wait.missing))
        parts.append(table)
    parts += [Text(remark, style="dim") for remark in told.remarks]
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


def _some(ranks: Sequence[int]) -> str:
    """Return ranks for people, runs of them shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f" and {len(words) - _RANKS} more" if len(words) > _RANKS else ""
    return ", ".join(words[:_RANKS]) + more or "-"
