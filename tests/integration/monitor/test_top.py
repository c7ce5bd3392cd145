"""Claims about `keepstep top`: its rendering of a job, and its error without a daemon."""

import asyncio
import io
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keepstep.monitor.cli.keys import Keys
from keepstep.monitor.cli.top import render, show, strip
from keepstep.monitor.daemon.settings import DaemonComponents, Settings
from keepstep.monitor.errors import MonitorUnreachable
from keepstep.monitor.tree.child_registry import Cursor
from keepstep.monitor.views.pages import overview
from keepstep.monitor.watch.watch import Watch
from tests.adaptive_timeouts import patient
from tests.integration.monitor.parts import settings
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleJobStatus, SampleReader, verdict
from tests.integration.monitor.test_daemon import FixedDiagnosis, Probe

ROOT = Path(__file__).parents[3]


def test_strip_shows_slow_steps_without_colours() -> None:
    assert strip([1.0, 1.05, 1.2, 1.4, 1.9, 5.0, None, 1.0, 1.0, 1.0, 1.0]).plain == "··▂▄▆█ ····"
    assert strip([]).plain == ""


def test_ranks_verdicts_and_goodput_fit_a_terminal_of_100_columns() -> None:
    async def ask() -> str:
        plan = Plan(ranks=4, steps=60, step_s=0.2, hang=(2, 41))
        parts = DaemonComponents(
            probe=Probe(),
            reader=SampleReader(plan, time.monotonic() - 20),
            diagnosis=FixedDiagnosis(verdict(2)),
            job_status_source=SampleJobStatus(time.time() - 200),
        )
        async with running(Settings(job="run7", node="node-a", secret=SECRET), parts) as url:
            values: dict[str, Any] = {}

            async def has_concluded() -> bool:
                values.update(await (await get(url, "/v1/overview")).json())
                return bool(values["verdicts"] and values["job_status"])

            await until(has_concluded)
            heat = await (await get(url, "/v1/heat?columns=40&rows=256")).json()
            console = Console(width=100, record=True, file=io.StringIO())
            console.print(render(values, heat, time.time()))
            return console.export_text()

    text = asyncio.run(ask())
    assert "non-communication hang: rank 2 on node-a" in text
    assert "stands still" in text
    assert "7 of 8 ranks wait for it" in text
    assert "steps 1 to 40" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    # As `keepstep status` names the nodes, and not as their hosts are called.
    assert re.search(r"1 +node-a +41 .*backward .*all reduce", text)
    assert re.search(r"2 +node-b +41 .*forward", text)
    assert "what to do: kill the process of rank 2" in text


def test_job_without_ranks_is_reported_with_the_jobs_recorded_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask() -> str:
        reader = SampleReader(Plan(ranks=2), time.monotonic(), ranks=[])
        async with running(
            settings(),
            DaemonComponents(
                probe=Probe(),
                reader=reader,
                diagnosis=FixedDiagnosis(),
                recorded=lambda: ("run6", "run8"),
            ),
        ) as url:
            values = await (await get(url, "/v1/overview")).json()
            heat = await (await get(url, "/v1/heat?columns=40&rows=256")).json()
            console = Console(width=100, record=True, file=io.StringIO())
            console.print(render(values, heat, time.time()))
            return console.export_text()

    with caplog.at_level("INFO"):
        text = asyncio.run(ask())
    message = "no rank of job run7 is known yet; recorded on this node: run6, run8"
    assert message in text
    assert message in caplog.text
    assert "no verdict holds" not in text


def test_top_once_prints_and_without_a_daemon_is_an_error() -> None:
    async def ask() -> None:
        parts = DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(ranks=2), time.monotonic() - 5),
            diagnosis=FixedDiagnosis(),
        )
        async with running(Settings(job="run7", node="node-a", secret=SECRET), parts) as url:
            # Following a daemon ends at once where the output is no terminal.
            for once in (True, False):
                await asyncio.to_thread(show, f"{url}/", SECRET, once=once)
            with pytest.raises(MonitorUnreachable, match="--secret-file"):
                await asyncio.to_thread(show, url, b"the secret of another job", once=True)

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


def test_rank_without_recent_reading_is_not_shown_as_alive() -> None:
    """Its daemon was killed; its last report, in which the rank is alive, is kept for a minute."""
    begin_s = time.monotonic() - 5
    now_s = time.monotonic()
    below = [
        Watch(f"n{n}", SampleReader(Plan(ranks=3), begin_s, f"n{n}", ranks), Probe(), None)
        for n, ranks in enumerate(([0, 1], [2]))
    ]
    root = Watch("root", None, Probe(), FixedDiagnosis(), now_s=lambda: now_s)
    for watch in below:
        watch.read()
        root.receive(watch.node, watch.summary(Cursor("", 0, 0), 100))
    now_s += 41
    below[0].read()
    root.receive("n0", below[0].summary(Cursor("", 0, 0), 100))
    root.record_failure("n1", "no answer")
    values = overview(root, "run7", None, tuple)
    assert [rank["state"] for rank in values["ranks"]] == ["alive", "alive", "unheard"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(values, {"steps": [], "rows": [], "seconds": []}, time.time()))
    text = console.export_text()
    assert "ranks 2 of 3 alive, 1 not reporting" in text
    assert re.search(r"2 +n1 .*no report for 41.0 s", text)


def test_key_that_is_pressed_while_nobody_reads_is_read_next() -> None:
    async def check() -> None:
        ours, terminal = pty.openpty()
        keys = Keys(terminal)
        with keys.reading():
            assert await keys.next(0.01) == ""
        os.write(ours, b"m")
        # The terminal shows what it has taken in.
        assert os.read(ours, 1) == b"m"
        with keys.reading():
            assert await keys.next(patient(10)) == "m"
        os.close(ours)
        os.close(terminal)

    asyncio.run(check())


def test_verdict_is_muted_by_a_key() -> None:
    async def is_muted(url: str) -> bool:
        (entry,) = (await (await get(url, "/v1/overview")).json())["verdicts"]
        return entry["note"] is not None and "ticket 12" in entry["note"]["text"]

    async def check() -> None:
        parts = DaemonComponents(
            probe=Probe(),
            reader=SampleReader(Plan(ranks=2), time.monotonic() - 5),
            diagnosis=FixedDiagnosis(verdict(1)),
        )
        async with running(settings(), parts) as url:
            ours, terminal = pty.openpty()
            top = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "keepstep", "top", "--url", url, "--job", "x",
                env={**os.environ, "KEEPSTEP_SECRET": SECRET.decode(), "TERM": "xterm"},
                stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            )  # fmt: skip
            seen = b""
            asyncio.get_running_loop().add_reader(ours, lambda: read())

            def read() -> None:
                nonlocal seen
                seen += os.read(ours, 65536)

            try:
                for awaited, answer in (
                    (b"#1 ", b"m"),
                    (b"number of the verdict", b"1\n"),
                    (b"reason", b"ticket 12\n"),
                    (b"for how long", b"2h\n"),
                    (b"is muted by", b""),
                ):
                    await until(lambda awaited=awaited: awaited in seen)
                    os.write(ours, answer)
                await until(lambda: is_muted(url))
            finally:
                asyncio.get_running_loop().remove_reader(ours)
                top.kill()
                await top.wait()
                os.close(ours)
                os.close(terminal)

    asyncio.run(check())


def test_monitor_of_a_job_is_found_by_the_name_of_the_job(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "KEEPSTEP_SECRET": "x" * 32}
    environment["KEEPSTEP_MONITOR_DIR"] = str(tmp_path / "rings")

    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "keepstep", *arguments]

    with ExitStack() as stack:
        for job in ("run7", "run8"):
            monitor = stack.enter_context(
                subprocess.Popen(
                    command("monitor", "--job", job, "--port", "0"),
                    env=environment, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            stack.callback(monitor.terminate)
            assert monitor.stdout is not None
            assert monitor.stdout.readline().startswith(f"watching job {job}: ")
        deadline_s = time.monotonic() + patient(30)
        shown = ""
        # A monitor prints its address just before it registers.
        while "job run8 " not in shown and time.monotonic() < deadline_s:
            top = subprocess.run(
                command("top", "--once", "--job", "run8"),
                env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            shown = top.stdout
        assert "job run8 " in shown
    assert not list((tmp_path / "keepstep" / "monitors").iterdir())
