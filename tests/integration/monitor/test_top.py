"""The terminal's picture of a job, and what it says when there is no daemon."""

import asyncio
import io
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keepstep.monitor.cli.top import address_and_token, render, show, strip
from keepstep.monitor.daemon.daemon import DaemonComponents, Settings
from keepstep.monitor.secret import bearer_token
from keepstep.monitor.views.pages import overview
from keepstep.monitor.watch.watch import Watch
from tests.integration.monitor.parts import settings
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleReader, SampleTeller, verdict
from tests.integration.monitor.test_daemon import Probe, Says

ROOT = Path(__file__).parents[3]


def test_strip_shows_what_stands_out_without_colours() -> None:
    assert strip([1.0, 1.05, 1.2, 1.4, 1.9, 5.0, None, 1.0, 1.0, 1.0, 1.0]).plain == "··▂▄▆█ ····"
    assert strip([]).plain == ""


def test_ranks_verdicts_and_goodput_fit_a_terminal_of_100_columns() -> None:
    async def ask() -> str:
        plan = Plan(ranks=4, steps=60, step_s=0.2, hang=(2, 41))
        parts = DaemonComponents(
            Probe(),
            SampleReader(plan, time.monotonic() - 20),
            Says(verdict(2)),
            job_status_source=SampleTeller(time.time() - 200),
        )
        async with running(Settings("run7", "node-a", SECRET), parts) as url:
            told: dict[str, Any] = {}

            async def has_concluded() -> bool:
                told.update(await (await get(url, "/v1/overview")).json())
                return bool(told["verdicts"] and told["job_status"])

            await until(has_concluded)
            heat = await (await get(url, "/v1/heat?columns=40&rows=256")).json()
            console = Console(width=100, record=True, file=io.StringIO())
            console.print(render(told, heat, time.time()))
            return console.export_text()

    text = asyncio.run(ask())
    assert "non-communication hang: rank 2 on node-a" in text
    assert "stands still" in text
    assert "7 of 8 ranks wait for it" in text
    assert "steps 1 to 40" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert re.search(r"1 +node-a +41 .*backward .*all reduce", text)
    assert re.search(r"2 +node-a +41 .*forward", text)


def test_where_no_rank_is_heard_of_that_is_said_and_which_jobs_are_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask() -> str:
        reader = SampleReader(Plan(ranks=2), time.monotonic(), ranks=[])
        async with running(
            settings(), DaemonComponents(Probe(), reader, Says(), recorded=lambda: ("run6", "run8"))
        ) as url:
            told = await (await get(url, "/v1/overview")).json()
            heat = await (await get(url, "/v1/heat?columns=40&rows=256")).json()
            console = Console(width=100, record=True, file=io.StringIO())
            console.print(render(told, heat, time.time()))
            return console.export_text()

    with caplog.at_level("INFO"):
        text = asyncio.run(ask())
    said = "no rank of job run7 is heard of yet; recorded on this node: run6, run8"
    assert said in text
    assert said in caplog.text
    assert "no verdict holds" not in text


def test_top_once_prints_and_without_a_daemon_says_so() -> None:
    async def ask() -> None:
        parts = DaemonComponents(Probe(), SampleReader(Plan(ranks=2), time.monotonic() - 5), Says())
        async with running(Settings("run7", "node-a", SECRET), parts) as url:
            # What `keepstep monitor` prints.
            address, token = address_and_token(f"{url}/#token={bearer_token(SECRET)}")
            await asyncio.get_running_loop().run_in_executor(
                None, lambda: show(address, token, once=True)
            )

    asyncio.run(ask())
    done = subprocess.run(
        [sys.executable, "-P", "-m", "keepstep", "top", "--once", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "no monitor answers at" in done.stderr
    assert "Traceback" not in done.stderr


def test_rank_that_was_not_heard_of_for_a_while_is_not_said_to_be_alive() -> None:
    """Its daemon was killed: what it told last is kept for a minute, and says that the rank is alive."""
    begin_s = time.monotonic() - 5
    now_s = time.monotonic()
    below = [
        Watch(f"n{n}", SampleReader(Plan(ranks=3), begin_s, f"n{n}", ranks), Probe(), None)
        for n, ranks in enumerate(([0, 1], [2]))
    ]
    root = Watch("root", None, Probe(), Says(), now_s=lambda: now_s)
    for one in below:
        one.read()
        root.receive(one.node, one.summary("", 0, 100))
    now_s += 41
    below[0].read()
    root.receive("n0", below[0].summary("", 0, 100))
    root.record_failure("n1", "no answer")
    told = overview(root, "run7", None, tuple)
    assert [rank["state"] for rank in told["ranks"]] == ["alive", "alive", "unheard"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(told, {"steps": [], "rows": [], "seconds": []}, time.time()))
    text = console.export_text()
    assert "ranks 2 of 3 alive, 1 not heard of" in text
    assert re.search(r"2 +n1 .*not heard of for 41.0 s", text)
