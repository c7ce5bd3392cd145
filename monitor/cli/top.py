"""Implements `keepstep top`: shows a daemon's state in the terminal.

The rendering is pure; `show` requests the state once a second. A row of the heat strip is a rank, a
character a step: a step of the usual duration is a dot, and the longer a step took, the taller the
block, so the strip is readable without colours.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepstep.monitor.cli.keys import Keys
from keepstep.monitor.cli.notes import NOTE_KEYS, ask_note
from keepstep.monitor.errors import MonitorUnreachable, ProtocolViolation
from keepstep.monitor.tree.monitor_client import MonitorClient

_EVERY_S = 1.0
_TIMEOUT_S = 5.0
_LEAST_STEPS, _MOST_STEPS = 10, 40
_OTHER_COLUMNS = 70
"""Characters of a line that the strip of steps leaves to what a rank is doing, and so on."""
_ROWS = 256
_KEYS = "m mutes a verdict, a acknowledges one, u ends that; Ctrl-C ends"
# Up to a tenth above the usual duration is noise; beyond it, the limit of each block.
_BLOCKS = (
    (1.1, "·", "dim"),
    (1.25, "▂", "yellow"),
    (1.5, "▄", "yellow"),
    (2.0, "▆", "bold dark_orange"),
)
_TALLEST = ("█", "bold red")


def show(url: str, secret: bytes, *, once: bool) -> None:
    """Show the state of the daemon at `url`, once or until interrupted.

    Args:
        url: of the daemon.
        secret: the job's.
        once: print the state once and return, as it is done where the output is no terminal.

    Raises:
        MonitorUnreachable: it does not answer, refuses, or does not know the secret.
    """
    try:
        asyncio.run(_show(url.rstrip("/"), secret, once or not sys.stdout.isatty()))
    except KeyboardInterrupt:
        return


def render(overview: Mapping[str, Any], heat: Mapping[str, Any], now_s: float) -> RenderableType:
    """Return a daemon's overview and heat map, both JSON, for a terminal."""
    parts: list[RenderableType] = [Text(_head(overview), style="bold")]
    status = overview["job_status"] or {}
    if status.get("paused"):
        since = time.strftime("%H:%M:%S", time.localtime(status["paused_at_s"]))
        text = f"paused since {since}, `keepstep resume {overview['job']}` goes on: "
        parts.append(Text(f"{text}{status['paused']}", style="yellow"))
    holding = [entry for entry in overview["verdicts"] if entry["closed_at_s"] is None]
    parts += [_verdict(entry, now_s) for entry in holding]
    parts += [
        Text(f"#{note['number']} {note['syndrome']}: {note['whom']}, {note['text']}", style="dim")
        for note in overview["notes"]
        if not any(entry["note"] == note for entry in holding)
    ]
    if not holding and not status.get("paused"):
        parts.append(_no_verdict(overview))
    for url, reason in overview["missing"].items():
        parts.append(Text(f"no answer from {url}: {reason}", style="yellow"))
    suspects = {rank for entry in holding for rank in entry["verdict"]["subject"]["ranks"]}
    parts.append(_ranks(overview, heat, suspects))
    return Group(*parts)


def _head(overview: Mapping[str, Any]) -> str:
    step = max((rank["step"] for rank in overview["ranks"]), default=0)
    states = [rank["state"] for rank in overview["ranks"]]
    pace, reported = overview["pace"], overview["reported"]
    head = f"job {overview['job']}   step {step}   {pace['name']}"
    if pace["seconds"] is not None or pace["name"] == "a step takes":
        head += f" {_seconds(pace['seconds'])}"
    if reported["loss"] is not None:
        head += f"   loss {reported['loss']:.4g}"
    if reported["tokens_per_s"] is not None:
        head += f"   {reported['tokens_per_s']:,.0f} tokens/s"
    head += f"   ranks {states.count('alive')} of {overview['ranks_total']} alive"
    if "unheard" in states:
        head += f", {states.count('unheard')} not reporting"
    if overview["job_status"] is not None:
        head += f"   goodput {overview['job_status']['goodput']['share']:.1%}"
    return head


def _no_verdict(overview: Mapping[str, Any]) -> RenderableType:
    if overview["absence"]:
        return Text(overview["absence"], style="yellow")
    if overview["diagnoses"]:
        return Text("no verdict holds", style="green")
    return Text("this daemon only relays; the daemon above it diagnoses", style="dim")


def _verdict(entry: Mapping[str, Any], now_s: float) -> RenderableType:
    verdict = entry["verdict"]
    cost_s = verdict["cost_s_per_step"]
    if cost_s is None:
        cost, style = "stands still", "bold red"
    elif cost_s > 0:
        cost, style = f"costs {_seconds(cost_s)} a step", "bold dark_orange"
    else:
        cost, style = "costs nothing yet", "bold dark_orange"
    note = entry["note"]
    if note is not None:
        style = "dim"
    line = Text.assemble(
        f"#{entry['number']} ",
        (f"{verdict['syndrome']}: {entry['subject']}", style),
        f"   for {_seconds(now_s - entry['since_s'])}, {cost}, "
        f"confidence {verdict['confidence']:.0%}",
    )
    sentences = (*verdict["evidence"], f"what to do: {entry['to_do']}")
    if note is not None:
        sentences = (note["text"], *sentences)
    return Group(line, *(Padding(Text(sentence), (0, 0, 0, 2)) for sentence in sentences))


def _ranks(overview: Mapping[str, Any], heat: Mapping[str, Any], suspects: set[int]) -> Table:
    strips = {
        rank: cells
        for row, cells in zip(heat["rows"], heat["seconds"], strict=True)
        for rank in row
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    steps = heat["steps"]
    status = overview["job_status"] or {}
    node_of = {rank: each["node"] for each in status.get("members", ()) for rank in each["ranks"]}
    columns = (
        "rank",
        "node",
        "step",
        "last",
        f"steps {steps[0]} to {steps[-1]}" if steps else "steps",
        "doing",
    )
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in ("rank", "step", "last") else "left",
            no_wrap=name != "doing",
        )
    for rank in overview["ranks"]:
        has_died = not rank["is_alive"] and rank["ending"] != "finished"
        is_marked = rank["rank"] in suspects or has_died
        table.add_row(
            Text(str(rank["rank"]), style="bold red" if is_marked else ""),
            Text(node_of.get(rank["rank"], rank["node"])),
            str(rank["step"]),
            _seconds(rank["last_step_s"]),
            strip(strips.get(rank["rank"], ())),
            Text("ended: paused" if status.get("paused") else _doing(rank)),
        )
    return table


def strip(cells: Sequence[float | None]) -> Text:
    """Return a rank's steps as a strip of blocks, relative to their own median."""
    measured = [cell for cell in cells if cell is not None]
    usual = statistics.median(measured) if measured else 0.0
    text = Text()
    for cell in cells:
        if cell is None or usual <= 0:
            text.append(" ")
            continue
        block = next(
            ((block, style) for limit, block, style in _BLOCKS if cell / usual < limit), _TALLEST
        )
        text.append(*block)
    return text


def _doing(rank: Mapping[str, Any]) -> str:
    if rank["state"] == "gone":
        return {"finished": "has ended", "raised": "has failed", "failed": "has failed"}.get(
            rank["ending"], "is dead"
        )
    if rank["state"] == "unheard":
        return f"no report for {_seconds(rank['unheard_s'])}"
    doing = []
    if rank["phase"] is not None:
        doing.append(f"{rank['phase']['name']} {_seconds(rank['phase']['age_s'])}")
    if rank["operation"] is not None:
        operation = rank["operation"]
        doing.append(
            f"{operation['name']} no. {operation['number']} of group {operation['group']} "
            f"{_seconds(operation['age_s'])}"
        )
    if rank["silent_s"] > 1:
        doing.append(f"no progress for {_seconds(rank['silent_s'])}")
    return ", ".join(doing)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"


async def _show(url: str, secret: bytes, once: bool) -> None:
    client = MonitorClient(secret)
    try:
        # The first failure is an error; later ones are shown, because the daemon may restart.
        shown = await _request(client, url)
        if once:
            Console().print(shown)
            return
        answer = _KEYS
        keys = Keys(sys.stdin.fileno() if sys.stdin.isatty() else None)
        with Live(shown, refresh_per_second=4, screen=True) as live:
            while True:
                with keys.reading():
                    key = await keys.next(_EVERY_S)
                try:
                    if key in NOTE_KEYS:
                        live.stop()
                        answer = await ask_note(client, url, NOTE_KEYS[key])
                        live.start()
                    shown = await _request(client, url)
                    live.update(Group(shown, Text(answer, style="dim")) if keys.has_any else shown)
                except MonitorUnreachable as error:
                    live.update(Group(Text(escape(str(error)), style="bold red"), shown))
    finally:
        await client.close()


async def _request(client: MonitorClient, url: str) -> RenderableType:
    try:
        overview = await client.ask_object(f"{url}/v1/overview", _TIMEOUT_S)
        steps = max(_LEAST_STEPS, min(_MOST_STEPS, Console().width - _OTHER_COLUMNS))
        heat = await client.ask_object(f"{url}/v1/heat?columns={steps}&rows={_ROWS}", _TIMEOUT_S)
        return render(overview, heat, time.time())
    except (ProtocolViolation, KeyError, TypeError, ValueError) as error:
        raise MonitorUnreachable(
            f"{url} is not a keepstep monitor of this version: {error}"
        ) from error
