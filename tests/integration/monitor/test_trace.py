"""Claims about `keepstep monitor trace`: what it collects from a tree of real daemons."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keepstep.monitor.cli.options import StepRange
from keepstep.monitor.cli.trace import record, write
from keepstep.monitor.contracts import RingReading
from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.errors import MonitorError, MonitorUnreachable
from keepstep.monitor.telemetry.clocks import align
from tests.adaptive_timeouts import patient
from tests.integration.monitor.jobs import Job
from tests.integration.monitor.parts import FixedDiagnosis, Probe, settings
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleReader

PLAN = Plan(ranks=4, steps=60, step_s=0.1)


class AheadReader(SampleReader):
    """Rings of a node whose monotonic clock is `ahead_s` ahead of this machine's."""

    ahead_s = 0.5

    def read(self) -> list[RingReading]:
        readings = super().read()
        for reading in readings:
            for name in ("enqueued_s", "started_s", "ended_s"):
                times = reading.records.records[name]
                times[times > 0] += self.ahead_s
        return readings


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    decoded: dict[str, Any] = json.loads(text)
    return list(decoded["traceEvents"])


def slices(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == category and event["ph"] == "X"]


def test_steps_of_all_nodes_are_on_one_clock_and_in_one_file(tmp_path: Path) -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 7
        async with (
            running(
                settings("n1"),
                DaemonComponents(probe=Probe(), reader=AheadReader(PLAN, begin_s, "n1", [2, 3])),
            ) as n1,
            running(
                settings("n0", align_every_s=0.05),
                DaemonComponents(
                    probe=Probe(),
                    reader=SampleReader(PLAN, begin_s, "n0", [0, 1]),
                    diagnosis=FixedDiagnosis(),
                    alignment=align,
                    children=lambda: (n1, "http://127.0.0.1:9"),
                ),
            ) as root,
        ):

            async def is_aligned() -> bool:
                clocks = json.loads(await (await get(root, "/v1/clocks")).text())
                return "n1" in clocks and clocks["n1"][1] is not None

            await until(is_aligned)
            steps, stopped = StepRange(10, 14), asyncio.Event()
            recorded = await record(root, "run7", SECRET, steps, stopped)
            write(recorded, "run7", tmp_path / "run7.json.gz", False)
            write(recorded, "run7", tmp_path / "ranks", True)

    asyncio.run(check())
    events = events_of(tmp_path / "run7.json.gz")
    steps = slices(events, "step")
    assert Counter(event["pid"] for event in steps) == dict.fromkeys(range(4), 5)
    assert {event["name"] for event in steps} == {f"step {number}" for number in range(10, 15)}
    # Every rank ends a reduction at the same time, also where the clock differs.
    ends: dict[int, list[float]] = {}
    for event in slices(events, "collective"):
        ends.setdefault(event["args"]["sequence"], []).append(event["ts"] + event["dur"])
    assert all(len(each) == 4 and max(each) - min(each) < 5000 for each in ends.values())
    files = sorted(path.name for path in (tmp_path / "ranks").iterdir())
    assert files == [f"rank{rank}.json.gz" for rank in range(4)]
    third = slices(events_of(tmp_path / "ranks" / "rank3.json.gz"), "step")
    assert [event["name"] for event in third] == [f"ProfilerStep#{n}" for n in range(10, 15)]


def test_missing_daemons_and_steps_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def check() -> None:
        # A ring that holds some twenty of fifty steps.
        reader = SampleReader(PLAN, time.monotonic() - 5, kept=400)
        parts = DaemonComponents(
            probe=Probe(), reader=reader, children=lambda: ("http://127.0.0.1:9",)
        )
        async with running(settings(), parts) as url:
            stopped = asyncio.Event()
            newest, _ = await record(url, "run7", SECRET, None, stopped)
            assert not newest.lost
            assert newest.complete == newest.steps.last > newest.steps.first > 1
            steps = StepRange(1, newest.steps.last)
            write(
                await record(url, "run7", SECRET, steps, stopped),
                "run7",
                tmp_path / "t.json",
                False,
            )
            past = await record(url, "run7", SECRET, StepRange(1, 1), stopped)
            with pytest.raises(MonitorError, match="step 1 of job run7 is no longer held"):
                write(past, "run7", tmp_path / "none.json", False)

    asyncio.run(check())
    said = capsys.readouterr().err
    assert "of ranks 0, 1, 2, 3 are no longer held, or only in part" in said
    assert "ranks below http://127.0.0.1:9 are missing: no monitor answers" in said
    assert not (tmp_path / "none.json").exists()


def test_steps_to_come_are_waited_for_and_collected_beyond_what_a_ring_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def check() -> None:
        plan = Plan(ranks=2, steps=400, step_s=0.05)
        reader = SampleReader(plan, time.monotonic() - 1, kept=700)
        async with running(settings(), DaemonComponents(probe=Probe(), reader=reader)) as url:
            newest, _ = await record(url, "run7", SECRET, None, asyncio.Event())
            first = newest.complete + 5
            steps = StepRange(first, first + 80)
            recorded = await record(url, "run7", SECRET, steps, asyncio.Event())
            assert recorded[0].lost == {}
            write(recorded, "run7", tmp_path / "t.json", False)

    asyncio.run(check())
    assert "waiting until all ranks have ended" in capsys.readouterr().err
    steps = slices(events_of(tmp_path / "t.json"), "step")
    assert Counter(event["pid"] for event in steps) == {0: 81, 1: 81}
    assert all("state" not in event["args"] for event in steps)


def test_interrupt_writes_what_there_is_of_a_step_that_does_not_end(tmp_path: Path) -> None:
    async def check() -> None:
        plan = Plan(ranks=2, steps=20, step_s=0.05, hang=(1, 10))
        parts = DaemonComponents(probe=Probe(), reader=SampleReader(plan, time.monotonic() - 5))
        async with running(settings(), parts) as url:
            stopped = asyncio.Event()
            waiting = asyncio.create_task(record(url, "run7", SECRET, StepRange(9, 12), stopped))
            await asyncio.sleep(0)
            stopped.set()
            write(await waiting, "run7", tmp_path / "t.json", False)

    asyncio.run(check())
    events = events_of(tmp_path / "t.json")
    waits = [event for event in events if event.get("args", {}).get("state") == "has not ended"]
    assert {event["args"]["step"] for event in waits} == {10}


def test_job_that_ended_before_and_an_unknown_job_are_errors(tmp_path: Path) -> None:
    async def check() -> None:
        parts = DaemonComponents(
            probe=Probe(), reader=SampleReader(PLAN, time.monotonic(), ranks=[])
        )
        async with running(settings(), parts) as url:
            with pytest.raises(MonitorError, match="knows no rank of job run7"):
                await record(url, "run7", SECRET, None, asyncio.Event())
            with pytest.raises(MonitorUnreachable, match="--secret-file"):
                await record(url, "run7", b"another secret", None, asyncio.Event())

    asyncio.run(check())


@pytest.mark.slow
def test_command_writes_the_steps_of_a_real_job(tmp_path: Path) -> None:
    environment = {**os.environ, "KEEPSTEP_MONITOR_DIR": str(tmp_path / "rings")}
    command = [sys.executable, "-P", "-m", "keepstep", "monitor"]
    with Job(tmp_path / "rings", "trains", 2) as job:
        job.expect("ready")
        daemon = subprocess.Popen(
            [*command, "--job", "test", "--port", "0"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert daemon.stdout is not None
            url = next(line for line in daemon.stdout if "http" in line).split()[-1].rstrip("/")
            path = tmp_path / "run7.json.gz"
            done = subprocess.run(
                [*command, "trace", "--steps", "2:4", "-o", str(path), "--url", url],
                env=environment,
                capture_output=True,
                text=True,
                timeout=patient(60),
                check=True,
            )
            assert f"{path}: steps 2 to 4 of 2 ranks" in done.stdout
            refused = subprocess.run(
                [*command, "trace", "-o", "run7.txt", "--url", url],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert refused.returncode == 2
            assert "must end in .json or .json.gz" in refused.stderr
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate()
    events = events_of(path)
    assert {event["name"] for event in slices(events, "phase")} >= {"backward", "optimizer"}
    assert Counter(e["pid"] for e in slices(events, "step")) == {0: 3, 1: 3}
    tied = Counter(event["ph"] for event in events if event["ph"] in "stf")
    assert tied["s"] == tied["f"] >= 3
