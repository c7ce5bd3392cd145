"""`keepstep top`: what a daemon tells, in the terminal. The rendering is pure; `show` asks the daemon once a second.

A row of the heat strip is a rank, a character a step: the usual is a dot, and the more a step took beyond it the taller the
block, so the strip reads without colours too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import aiohttp
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepstep.monitor.errors import MonitorUnreachable, ProtocolViolation
from keepstep.monitor.tree.children import parse_object

_EVERY_S = 1.0
_TIMEOUT_S = 5.0
_STEPS = 40
_ROWS = 256
# A tenth above the usual is noise; from there a block for every quarter.
_BLOCKS = (
    (1.1, "·", "dim"),
    (1.25, "▂", "yellow"),
    (1.5, "▄", "yellow"),
    (2.0, "▆", "bold dark_orange"),
)
_MOST = ("█", "bold red")


def show(url: str, token: str, *, once: bool) -> None:
    """Show what the daemon at `url` tells, once or until interrupted.

    Raises:
        MonitorUnreachable: it does not answer, or refuses the token.
    """
    try:
        asyncio.run(_show(url, token, once))
    except KeyboardInterrupt:
        return


def address_and_token(url: str) -> tuple[str, str]:
    """Return a daemon's address, and the token that follows it in what the daemon prints; empty if none does."""
    address, _, fragment = url.partition("#")
    return address.rstrip("/"), parse_qs(fragment).get("token", [""])[0]


def render(told: Mapping[str, Any], heat: Mapping[str, Any], now_s: float) -> RenderableType:
    """Return an overview and a heat map, as the daemon gives them, for a terminal."""
    step = max((rank["step"] for rank in told["ranks"]), default=0)
    states = [rank["state"] for rank in told["ranks"]]
    head = f"job {told['job']}   step {step}   a step takes {_seconds(told['typical_step_s'])}"
    head += f"   ranks {states.count('alive')} of {told['ranks_total']} alive"
    if "unheard" in states:
        head += f", {states.count('unheard')} not heard of"
    if told["job_status"] is not None:
        head += f"   goodput {told['job_status']['goodput']['share']:.1%}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    holding = [entry for entry in told["verdicts"] if entry["closed_at_s"] is None]
    parts += [_verdict(entry, now_s) for entry in holding]
    if not holding:
        if told["absence"]:
            parts.append(Text(told["absence"], style="yellow"))
        elif told["diagnoses"]:
            parts.append(Text("no verdict holds", style="green"))
        else:
            parts.append(
                Text("this daemon passes on what it hears; the one above it diagnoses", style="dim")
            )
    for url, reason in told["missing"].items():
        parts.append(Text(f"not heard: {url}: {reason}", style="yellow"))
    parts.append(
        _ranks(
            told, heat, {rank for entry in holding for rank in entry["verdict"]["subject"]["ranks"]}
        )
    )
    return Group(*parts)


def _verdict(entry: Mapping[str, Any], now_s: float) -> RenderableType:
    verdict = entry["verdict"]
    cost_s = verdict["cost_s_per_step"]
    cost = (
        "stands still"
        if cost_s is None
        else f"costs {_seconds(cost_s)} a step"
        if cost_s > 0
        else "costs nothing yet"
    )
    line = Text.assemble(
        (
            f"{verdict['syndrome']}: {entry['subject']}",
            "bold red" if cost_s is None else "bold dark_orange",
        ),
        f"   for {_seconds(now_s - entry['since_s'])}, {cost}, confidence {verdict['confidence']:.0%}, advice: {verdict['advice']}",
    )
    return Group(line, *(Padding(Text(sentence), (0, 0, 0, 2)) for sentence in verdict["evidence"]))


def _ranks(told: Mapping[str, Any], heat: Mapping[str, Any], sick: set[int]) -> Table:
    strips = {
        rank: cells
        for row, cells in zip(heat["rows"], heat["seconds"], strict=True)
        for rank in row
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    steps = heat["steps"]
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
    for rank in told["ranks"]:
        mark = (
            "bold red"
            if rank["rank"] in sick or not (rank["is_alive"] or rank["ending"] == "finished")
            else ""
        )
        table.add_row(
            Text(str(rank["rank"]), style=mark),
            Text(rank["node"]),
            str(rank["step"]),
            _seconds(rank["last_step_s"]),
            strip(strips.get(rank["rank"], ())),
            Text(_doing(rank)),
        )
    return table


def strip(cells: Sequence[float | None]) -> Text:
    """Return a rank's steps as a strip of blocks, relative to their own median."""
    known = [cell for cell in cells if cell is not None]
    usual = statistics.median(known) if known else 0.0
    text = Text()
    for cell in cells:
        if cell is None or usual <= 0:
            text.append(" ")
            continue
        block = next(
            ((block, style) for limit, block, style in _BLOCKS if cell / usual < limit), _MOST
        )
        text.append(*block)
    return text


def _doing(rank: Mapping[str, Any]) -> str:
    if rank["state"] == "gone":
        return {"finished": "has ended", "raised": "has failed", "failed": "has failed"}.get(
            rank["ending"], "is dead"
        )
    if rank["state"] == "unheard":
        return f"not heard of for {_seconds(rank['unheard_s'])}"
    doing = []
    if rank["phase"] is not None:
        doing.append(f"{rank['phase']['name']} {_seconds(rank['phase']['age_s'])}")
    if rank["operation"] is not None:
        operation = rank["operation"]
        doing.append(
            f"{operation['name']} no. {operation['number']} of group {operation['group']} {_seconds(operation['age_s'])}"
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


async def _show(url: str, token: str, once: bool) -> None:
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"}, timeout=aiohttp.ClientTimeout(_TIMEOUT_S)
    ) as session:
        if once:
            Console().print(await _ask(session, url))
            return
        # The first failure is an error; later ones are shown, for daemons come back.
        shown = await _ask(session, url)
        with Live(shown, refresh_per_second=4, screen=True) as live:
            while True:
                await asyncio.sleep(_EVERY_S)
                try:
                    shown = await _ask(session, url)
                    live.update(shown)
                except MonitorUnreachable as error:
                    live.update(Group(Text(escape(str(error)), style="bold red"), shown))


async def _ask(session: aiohttp.ClientSession, url: str) -> RenderableType:
    told = await _get(session, f"{url}/v1/overview")
    heat = await _get(session, f"{url}/v1/heat?columns={_STEPS}&rows={_ROWS}")
    try:
        return render(told, heat, time.time())
    except (KeyError, TypeError, ValueError) as error:
        raise MonitorUnreachable(
            f"what answers at {url} is no keepstep monitor of this version: {error}"
        ) from error


async def _get(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    try:
        async with session.get(address) as response:
            if response.status == 401:
                raise MonitorUnreachable(
                    f"{address}: the token was refused; give --job and --secret-file of the job it watches"
                )
            if response.status != 200:
                raise MonitorUnreachable(f"{address} answered status {response.status}")
            return parse_object(await response.read())
    except (aiohttp.ClientError, TimeoutError, ProtocolViolation) as error:
        raise MonitorUnreachable(
            f"no monitor answers at {address}: {error or 'no answer in time'}"
        ) from error
