"""Claims about real daemons over HTTP: their answers, authorization, actions, and failures."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep.monitor.contracts import JobStatus, RingReading
from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementPolicy, Mode
from keepstep.monitor.errors import MonitorError, RuntimeUnreachable
from keepstep.monitor.node import stacks
from keepstep.monitor.node.probes import NodeProbe
from keepstep.monitor.secret import bearer_token
from keepstep.monitor.watch.verdict_notes import NoteKind, NoteRequest
from tests.integration.monitor.parts import (
    PLAN,
    Enforcer,
    FixedDiagnosis,
    FixedJobStatus,
    Probe,
    Publisher,
    settings,
)
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleJobStatus, SampleReader, verdict

ROOT = Path(__file__).parents[3]
RESTARTING = EnforcementPolicy(Mode.RESTART, sustained_s=0.0)


def components(**others: Any) -> DaemonComponents:
    """Return a daemon's components, with the records of a sample that began 5 s ago."""
    reader = SampleReader(PLAN, time.monotonic() - 5)
    return DaemonComponents(probe=Probe(), reader=reader, **others)


def test_one_daemon_shows_ranks_steps_and_delays() -> None:
    async def check() -> None:
        reader = SampleReader(PLAN, time.monotonic() - 10)
        async with running(
            settings(),
            DaemonComponents(
                probe=Probe(),
                reader=reader,
                diagnosis=FixedDiagnosis(),
                job_status_source=SampleJobStatus(time.time() - 100),
            ),
        ) as url:
            overview = await (await get(url, "/v1/overview")).json()
            assert [rank["rank"] for rank in overview["ranks"]] == list(range(8))
            assert all(rank["step"] > 50 and rank["is_alive"] for rank in overview["ranks"])
            assert overview["typical_step_s"] == pytest.approx(0.1, rel=0.25)
            heat = await (await get(url, "/v1/heat?columns=40")).json()
            assert len(heat["steps"]) == 40
            assert len(heat["seconds"]) == 8
            delays = await (await get(url, "/v1/delays")).json()
            assert delays["transfer"][0][1] > 0
            assert delays["transfer"][0][2] is None
            step = await (await get(url, "/v1/steps/newest")).json()
            names = {span["name"] for span in step["ranks"][0]["spans"]}
            assert {"step", "forward", "backward", "all reduce"} <= names

            async def has_job_status() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                return (
                    overview["job_status"] is not None
                    and 0 < overview["job_status"]["goodput"]["share"] < 1
                )

            await until(has_job_status)
        assert reader.closed

    asyncio.run(check())


def test_late_rank_has_the_greatest_column_of_waiting_times() -> None:
    async def check() -> None:
        plan = Plan(ranks=6, steps=100, step_s=0.1, slow={4: 1.6}, slow_link=(1, 2))
        async with running(
            settings(),
            DaemonComponents(probe=Probe(), reader=SampleReader(plan, time.monotonic() - 10)),
        ) as url:
            delays = await (await get(url, "/v1/delays")).json()
            waits = [sum(row[j] or 0 for row in delays["waiting"]) for j in range(6)]
            assert max(range(6), key=lambda j: waits[j]) == 4
            cells = {
                (i, j): cell
                for i, row in enumerate(delays["transfer"])
                for j, cell in enumerate(row)
                if cell
            }
            assert max(cells, key=lambda pair: cells[pair]) == (1, 2)

    asyncio.run(check())


@pytest.mark.parametrize(
    "path", ["/v1/summary", "/v1/overview", "/v1/heat", "/v1/stacks/0", "/metrics"]
)
def test_request_without_the_token_is_refused(path: str) -> None:
    async def check() -> None:
        async with running(
            settings(), DaemonComponents(probe=Probe(), reader=SampleReader(PLAN, time.monotonic()))
        ) as url:
            assert (await get(url, path)).status == 200
            for token in (
                "",
                "wrong",
                bearer_token(b"another secret"),
            ):
                assert (await get(url, path, token)).status == 401

    asyncio.run(check())


def test_access_without_a_token_requires_loopback_as_client_and_as_host() -> None:
    async def check() -> None:
        async with running(
            settings(opens_to_loopback=True), DaemonComponents(probe=Probe())
        ) as url:
            assert (await get(url, "/v1/overview", "")).status == 200
            # A page of another site whose name resolves to this machine sends its own name.
            port = url.rpartition(":")[2]
            process = await asyncio.create_subprocess_exec(
                *("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}"),
                *("-H", f"Host: evil.example:{port}", f"{url}/v1/overview"),
                stdout=subprocess.PIPE,
            )
            status, _ = await process.communicate()
            assert status == b"401"
        with pytest.raises(MonitorError, match="loopback only"):
            async with running(
                settings(host="0.0.0.0", opens_to_loopback=True), DaemonComponents(probe=Probe())
            ):
                pass

    asyncio.run(check())


def test_page_of_another_site_cannot_ask_through_a_browser_on_this_machine() -> None:
    """It could not read the answer, but have stacks dumped."""

    async def check() -> None:
        async with (
            running(settings(opens_to_loopback=True), DaemonComponents(probe=Probe())) as url,
            aiohttp.ClientSession() as session,
        ):
            for path in ("/v1/overview", "/v1/stacks/0", "/metrics"):
                for headers, expected in (
                    ({}, 200),
                    ({"Sec-Fetch-Site": "none"}, 200),
                    ({"Sec-Fetch-Site": "same-origin", "Origin": url}, 200),
                    ({"Sec-Fetch-Site": "cross-site"}, 401),
                    # A page of another program of this machine.
                    ({"Sec-Fetch-Site": "same-site"}, 401),
                    ({"Origin": "http://127.0.0.1:1"}, 401),
                    ({"Origin": "null"}, 401),
                ):
                    async with session.get(url + path, headers=headers) as answer:
                        assert answer.status == expected, (path, headers)

    asyncio.run(check())


@pytest.mark.parametrize("has_terminal", [False, True])
def test_token_is_printed_to_a_terminal_only(tmp_path: Path, has_terminal: bool) -> None:
    """A service manager keeps what a daemon prints."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "KEEPSTEP_SECRET": "x" * 32}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "keepstep", "monitor", "--job", "run7", "--port", "0"],
        cwd=ROOT,
        env=environment,
        stdout=terminal if has_terminal else subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as daemon:
        os.close(terminal)
        try:
            if has_terminal:
                line = b""
                while b"\n" not in line:
                    line += os.read(controller, 4096)
            else:
                assert daemon.stdout is not None
                line = daemon.stdout.readline()
        finally:
            daemon.terminate()
            os.close(controller)
    assert b"watching job run7: http://127.0.0.1:" in line
    assert (bearer_token(b"x" * 32).encode() in line) == has_terminal


def test_policy_acts_only_on_the_generation_that_the_verdict_is_about(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        enforcer, publisher, job_status_source = (
            Enforcer(),
            Publisher(),
            FixedJobStatus(generation=1),
        )
        diagnosis = FixedDiagnosis(verdict(2, since_s=time.monotonic() - 4))
        parts = components(
            diagnosis=diagnosis,
            publisher=publisher,
            job_status_source=job_status_source,
            policy=RESTARTING,
            enforcer=enforcer,
        )
        async with running(settings(events=tmp_path / "events.jsonl"), parts):
            await until(lambda: len(diagnosis.digests) > 3)
            # The rings have generation 0, so they are not of generation 1.
            assert (enforcer.requested, publisher.published) == ([], [])
            job_status_source.generation = 0
            await until(lambda: bool(enforcer.requested))
        (action, generation), *others = enforcer.requested
        assert (action.kind, action.ranks, action.subject.node, generation) == (
            ActionKind.RESTART_WORKER,
            (2,),
            "a",
            0,
        )
        assert others == []
        assert "keepstep.policy.acted" in (tmp_path / "events.jsonl").read_text()

    asyncio.run(check())


def test_hang_is_alerted_while_the_runtime_is_unreachable_and_acted_on_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unreachable(FixedJobStatus):
        def job_status(self) -> JobStatus:
            if self.generation < 0:
                raise RuntimeUnreachable("no answer from etcd at h:1")
            return super().job_status()

    def logged(kind: ActionKind) -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.getMessage().startswith(f"{kind}:")
        ]

    async def check() -> None:
        enforcer, publisher, job_status_source = Enforcer(), Publisher(), Unreachable(generation=-1)
        parts = components(
            diagnosis=FixedDiagnosis(verdict(2, since_s=time.monotonic() - 4)),
            publisher=publisher,
            job_status_source=job_status_source,
            policy=RESTARTING,
            enforcer=enforcer,
        )
        async with running(settings(), parts) as url:
            await until(lambda: bool(logged(ActionKind.ALERT)))
            assert "rank 2 on node-a" in logged(ActionKind.ALERT)[0]
            assert (enforcer.requested, publisher.published) == ([], [])
            job_status_source.generation = 0
            await until(lambda: bool(enforcer.requested))
            # The runtime's names of nodes remain valid while it is unreachable again.
            assert enforcer.requested[0][0].subject.node == "a"
            job_status_source.generation = -1
            await until(lambda: caplog.text.count("until it answers") == 2)
            assert (await (await get(url, "/v1/overview")).json())["faults"] == {}
        assert len(logged(ActionKind.ALERT)) == 1
        assert "Traceback" not in caplog.text

    with caplog.at_level("INFO"):
        asyncio.run(check())


def test_verdict_about_an_earlier_run_is_not_enforced_on_the_next() -> None:
    began_at_s = time.time() - 2

    class Next(FixedJobStatus):
        def job_status(self) -> JobStatus:
            return replace(super().job_status(), began_at_s=began_at_s)

    async def check() -> None:
        enforcer, diagnosis = Enforcer(), FixedDiagnosis(verdict(2, since_s=time.monotonic() - 4))
        parts = components(
            diagnosis=diagnosis,
            job_status_source=Next(generation=0),
            policy=RESTARTING,
            enforcer=enforcer,
        )
        async with running(settings(), parts):
            await until(lambda: len(diagnosis.digests) > 5)
            assert enforcer.requested == []
            diagnosis.verdicts = (verdict(3, since_s=time.monotonic()),)
            await until(lambda: bool(enforcer.requested))
        assert [action.ranks for action, _ in enforcer.requested] == [(3,)]

    asyncio.run(check())


def test_dead_rank_of_an_earlier_run_with_a_later_generation_does_not_suppress_actions() -> None:
    class Left(SampleReader):
        def read(self) -> list[RingReading]:
            *others, last = super().read()
            records = replace(last.records, is_alive=False)
            return [
                *(replace(reading, generation=1) for reading in others),
                replace(last, records=records, generation=3),
            ]

    async def check() -> None:
        enforcer, diagnosis = Enforcer(), FixedDiagnosis(verdict(2, since_s=time.monotonic()))
        parts = DaemonComponents(
            probe=Probe(),
            reader=Left(PLAN, time.monotonic() - 5),
            diagnosis=diagnosis,
            job_status_source=FixedJobStatus(generation=1),
            policy=RESTARTING,
            enforcer=enforcer,
        )
        async with running(settings(), parts):
            await until(lambda: bool(enforcer.requested))

    asyncio.run(check())


def test_stacks_of_many_hangs_that_open_at_once_are_dumped_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dump(pid: int) -> dict[str, Any]:
        # So that all have asked before the first is done.
        await asyncio.sleep(0.1)
        return {"threads": [pid]}

    monkeypatch.setattr(stacks, "dump", dump)

    async def check() -> None:
        parts = DaemonComponents(
            probe=Probe(),
            reader=SampleReader(
                PLAN, time.monotonic() - 5, pids={rank: rank for rank in range(PLAN.ranks)}
            ),
            diagnosis=FixedDiagnosis(*map(verdict, range(PLAN.ranks))),
        )
        async with running(settings(), parts) as url:
            found: dict[str, Any] = {}

            async def has_stacks() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                for entry in overview["verdicts"]:
                    found.update(entry["stacks"])
                return len(found) == PLAN.ranks

            await until(has_stacks)
            assert all("threads" in dumped for dumped in found.values())

    asyncio.run(check())


def test_verdict_is_published_written_and_survives_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        publisher = Publisher()
        kept = settings(events=tmp_path / "events.jsonl", state=tmp_path / "state.json")
        diagnosis = FixedDiagnosis(verdict(2, since_s=time.monotonic() - 4))
        parts = components(diagnosis=diagnosis, publisher=publisher)
        async with running(kept, parts) as url:

            async def has_stacks() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                return bool(overview["verdicts"]) and "2" in overview["verdicts"][0]["stacks"]

            await until(has_stacks)
        assert publisher.published == [diagnosis.verdicts]
        assert publisher.closed
        async with running(
            kept,
            DaemonComponents(
                probe=Probe(), reader=SampleReader(PLAN, time.monotonic() - 5), diagnosis=diagnosis
            ),
        ) as url:
            overview = await (await get(url, "/v1/overview")).json()
            assert [entry["number"] for entry in overview["verdicts"]] == [1]
            assert time.time() - overview["verdicts"][0]["since_s"] > 4
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [line["event_name"] for line in lines] == [
            "keepstep.verdict.opened",
            "keepstep.verdict.stacks",
        ]
        assert lines[0]["severity_text"] == "ERROR"
        assert lines[0]["attributes"]["keepstep.verdict.subject.ranks"] == [2]
        assert lines[0]["resource"]["keepstep.job"] == "run7"

    asyncio.run(check())


def test_command_mutes_a_verdict_which_is_listed_as_muted_after_a_restart(tmp_path: Path) -> None:
    def command(url: str, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "keepstep", "monitor", *arguments, "--url", url, "--job", "x"],
            env={**os.environ, "KEEPSTEP_SECRET": SECRET.decode()},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    async def check() -> None:
        kept = settings(events=tmp_path / "events.jsonl", state=tmp_path / "state.json")
        diagnosis = FixedDiagnosis(verdict(2, since_s=time.monotonic() - 4))

        async def noted(url: str) -> list[str | None]:
            overview = await (await get(url, "/v1/overview")).json()
            return [entry["note"] and entry["note"]["text"] for entry in overview["verdicts"]]

        async def has_opened(url: str) -> bool:
            return await noted(url) != []

        async with running(kept, components(diagnosis=diagnosis)) as url:
            await until(lambda: has_opened(url))
            mute = ("mute", "--for", "2h", "--reason", "ticket 12", "--by", "ann")
            code, output = await asyncio.to_thread(command, url, *mute, "7")
            assert (code, "no verdict 7 holds; 1 is rank 2" in output) == (1, True)
            code, output = await asyncio.to_thread(command, url, *mute, "1")
            assert (code, "is muted by ann until" in output) == (0, True)
            text = await (await get(url, "/metrics")).text()
            assert re.search(r'keepstep_verdict_note_active{.*note="muted".*} 1.0', text)
        async with running(kept, components(diagnosis=diagnosis)) as url:
            (text,) = await noted(url)
            assert text is not None
            assert text.startswith("muted by ann until")
            assert text.endswith("ticket 12")
            assert (await asyncio.to_thread(command, url, "unmute", "1"))[0] == 0
            await until(lambda: has_changed(url))
            code, _ = await asyncio.to_thread(command, url, "acknowledge", "--reason", "mine", "1")
            assert code == 0

        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        names = [line["body"].split()[2] for line in lines if line["event_name"].endswith("noted")]
        assert names == ["muted", "its", "acknowledged"]

    async def has_changed(url: str) -> bool:
        overview = await (await get(url, "/v1/overview")).json()
        return overview["verdicts"][0]["note"] is None

    asyncio.run(check())


def test_note_without_the_token_is_refused_also_where_the_page_is_open() -> None:
    async def check() -> None:
        parts = components(diagnosis=FixedDiagnosis(verdict(2)))
        async with (
            running(settings(opens_to_loopback=True), parts) as url,
            aiohttp.ClientSession() as web,
        ):
            note = NoteRequest(NoteKind.MUTED, "eve", "quiet", 60.0).encode()
            async with web.post(f"{url}/v1/verdicts/1/note", data=note) as answer:
                assert answer.status == 401

    asyncio.run(check())


def test_spent_budget_of_the_policy_survives_a_restart(tmp_path: Path) -> None:
    rules = EnforcementPolicy(Mode.RESTART, sustained_s=0.0, restarts=1)

    async def requested(rank: int) -> list[tuple[ActionKind, tuple[int, ...]]]:
        """Return the actions that a daemon requests in a few diagnoses in which this rank hangs."""
        enforcer, diagnosis = (
            Enforcer(),
            FixedDiagnosis(verdict(rank, since_s=time.monotonic() - 4)),
        )
        parts = components(diagnosis=diagnosis, policy=rules, enforcer=enforcer)
        async with running(settings(state=tmp_path / "state.json"), parts):
            await until(lambda: len(diagnosis.digests) > 3)
        return [(action.kind, action.ranks) for action, _ in enforcer.requested]

    async def check() -> None:
        assert await requested(2) == [(ActionKind.RESTART_WORKER, (2,))]
        assert await requested(5) == []
        # Without the state file, the whole budget is available again.
        (tmp_path / "state.json").unlink()
        assert await requested(5) == [(ActionKind.RESTART_WORKER, (5,))]

    asyncio.run(check())


def test_failing_component_does_not_stop_the_others() -> None:
    class Failing:
        def read(self) -> Any:
            raise OSError("no such ring")

        def job_status(self) -> Any:
            raise RuntimeError("no coordinator")

        def close(self) -> None:
            raise RuntimeError("cannot even close")

    def diagnosis(*_: Any) -> Any:
        raise ZeroDivisionError

    async def check() -> None:
        failing: Any = Failing()
        async with running(
            settings(),
            DaemonComponents(
                probe=Probe(), reader=None, diagnosis=diagnosis, job_status_source=failing
            ),
        ) as url:

            async def counted() -> bool:
                overview = await (await get(url, "/v1/overview")).json()
                return (
                    overview["faults"].get("diagnosis", 0) > 1
                    and overview["faults"].get("job_status", 0) >= 1
                )

            await until(counted)
        reader: Any = Failing()
        async with running(
            settings(), DaemonComponents(probe=Probe(), reader=reader, diagnosis=FixedDiagnosis())
        ) as url:

            async def read_failed() -> bool:
                return (await (await get(url, "/v1/overview")).json())["faults"].get(
                    "reader", 0
                ) > 1

            await until(read_failed)

    asyncio.run(check())


def test_probe_measures_this_machine_and_lists_stopped_ranks() -> None:
    probe = NodeProbe("node-a")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as stopped:
        try:
            os.kill(stopped.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
            workers = {4: os.getpid(), 5: stopped.pid, 6: 2**22 - 1}
            probe.sample(workers)
            metrics = probe.sample(workers)
        finally:
            stopped.kill()
            probe.close()
    assert metrics.stopped_ranks == (5,)
    assert 0 < metrics.memory_available <= metrics.memory_total
    assert 0 <= metrics.cpu_share <= 1
    assert metrics.load > 0
    assert metrics.node == "node-a"
