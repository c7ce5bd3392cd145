"""Real daemons over HTTP: what they show, to whom, what they do about it, and what happens when parts of them fail."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.monitor.contracts import JobStatus, RingReading
from keepstep.monitor.daemon.daemon import DaemonComponents
from keepstep.monitor.diagnosis.policy import ActionKind, EnforcementPolicy, Mode
from keepstep.monitor.errors import MonitorError, RuntimeUnreachable
from keepstep.monitor.node.probes import NodeProbe
from keepstep.monitor.secret import bearer_token
from tests.integration.monitor.parts import PLAN, Enforcer, Probe, Publisher, Says, Teller, settings
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleReader, SampleTeller, verdict


def test_one_daemon_shows_ranks_steps_and_delays() -> None:
    async def check() -> None:
        reader = SampleReader(PLAN, time.monotonic() - 10)
        async with running(
            settings(),
            DaemonComponents(
                Probe(), reader, Says(), job_status_source=SampleTeller(time.time() - 100)
            ),
        ) as url:
            told = await (await get(url, "/v1/overview")).json()
            assert [rank["rank"] for rank in told["ranks"]] == list(range(8))
            assert all(rank["step"] > 50 and rank["is_alive"] for rank in told["ranks"])
            assert told["typical_step_s"] == pytest.approx(0.1, rel=0.25)
            heat = await (await get(url, "/v1/heat?columns=40")).json()
            assert len(heat["steps"]) == 40
            assert len(heat["seconds"]) == 8
            delays = await (await get(url, "/v1/delays")).json()
            assert delays["transfer"][0][1] > 0
            assert delays["transfer"][0][2] is None
            step = await (await get(url, "/v1/steps/newest")).json()
            names = {span["name"] for span in step["ranks"][0]["spans"]}
            assert {"step", "forward", "backward", "all reduce"} <= names

            async def has_story() -> bool:
                found = await (await get(url, "/v1/overview")).json()
                return (
                    found["job_status"] is not None
                    and 0 < found["job_status"]["goodput"]["share"] < 1
                )

            await until(has_story)
        assert reader.closed

    asyncio.run(check())


def test_late_rank_is_the_column_that_stands_out() -> None:
    async def check() -> None:
        plan = Plan(ranks=6, steps=100, step_s=0.1, slow={4: 1.6}, slow_link=(1, 2))
        async with running(
            settings(), DaemonComponents(Probe(), SampleReader(plan, time.monotonic() - 10))
        ) as url:
            told = await (await get(url, "/v1/delays")).json()
            waits = [sum(row[j] or 0 for row in told["waiting"]) for j in range(6)]
            assert max(range(6), key=lambda j: waits[j]) == 4
            cells = {
                (i, j): cell
                for i, row in enumerate(told["transfer"])
                for j, cell in enumerate(row)
                if cell
            }
            assert max(cells, key=lambda pair: cells[pair]) == (1, 2)

    asyncio.run(check())


@pytest.mark.parametrize(
    "path", ["/v1/summary", "/v1/overview", "/v1/heat", "/v1/stacks/0", "/metrics"]
)
def test_whoever_lacks_the_token_learns_nothing(path: str) -> None:
    async def check() -> None:
        async with running(
            settings(), DaemonComponents(Probe(), SampleReader(PLAN, time.monotonic()))
        ) as url:
            assert (await get(url, path)).status == 200
            for token in (
                "",
                "wrong",
                bearer_token(b"another secret"),
                bearer_token(SECRET, "doctor"),
            ):
                assert (await get(url, path, token)).status == 401

    asyncio.run(check())


def test_page_without_token_is_for_loopback_by_name_only() -> None:
    async def check() -> None:
        async with running(settings(opens_to_loopback=True), DaemonComponents(Probe())) as url:
            assert (await get(url, "/v1/overview", "")).status == 200
            # Another site's page whose name was made to resolve to this machine still says its own name.
            port = url.rpartition(":")[2]
            process = await asyncio.create_subprocess_exec(
                "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"Host: evil.example:{port}",
                f"{url}/v1/overview", stdout=subprocess.PIPE,
            )  # fmt: skip
            status, _ = await process.communicate()
            assert status == b"401"
        with pytest.raises(MonitorError, match="loopback only"):
            async with running(
                settings(host="0.0.0.0", opens_to_loopback=True), DaemonComponents(Probe())
            ):
                pass

    asyncio.run(check())


def test_policy_acts_on_the_generation_that_the_verdict_speaks_of_and_on_no_other(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        enforcer, publisher, job_status_source = Enforcer(), Publisher(), Teller(generation=1)
        says = Says(verdict(2, since_s=time.monotonic() - 4))
        parts = DaemonComponents(
            Probe(), SampleReader(PLAN, time.monotonic() - 5), says,
            publisher=publisher, job_status_source=job_status_source, policy=EnforcementPolicy(Mode.RESTART, sustained_s=0.0), enforcer=enforcer,
        )  # fmt: skip
        async with running(settings(events=tmp_path / "events.jsonl"), parts):

            async def has_concluded() -> bool:
                return len(says.told) > 3

            await until(has_concluded)
            # The rings, which count no generations, are not of the first.
            assert (enforcer.asked, publisher.published) == ([], [])
            job_status_source.generation = 0

            async def has_asked() -> bool:
                return bool(enforcer.asked)

            await until(has_asked)
        (action, generation), *others = enforcer.asked
        assert (action.kind, action.ranks, action.subject.node, generation) == (
            ActionKind.RESTART_WORKER, (2,), "a", 0,
        )  # fmt: skip
        assert others == []
        assert "keepstep.policy.acted" in (tmp_path / "events.jsonl").read_text()

    asyncio.run(check())


def test_people_are_told_of_a_hang_while_the_runtime_is_away_and_it_acts_once_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(Teller):
        def job_status(self) -> JobStatus:
            if self.generation < 0:
                raise RuntimeUnreachable("no answer from etcd at h:1")
            return super().job_status()

    def told(kind: ActionKind) -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.getMessage().startswith(f"{kind}:")
        ]

    async def check() -> None:
        enforcer, publisher, job_status_source = Enforcer(), Publisher(), Away(generation=-1)
        parts = DaemonComponents(
            Probe(), SampleReader(PLAN, time.monotonic() - 5), Says(verdict(2, since_s=time.monotonic() - 4)),
            publisher=publisher, job_status_source=job_status_source, policy=EnforcementPolicy(Mode.RESTART, sustained_s=0.0), enforcer=enforcer,
        )  # fmt: skip
        async with running(settings(), parts) as url:

            async def has_alerted() -> bool:
                return bool(told(ActionKind.ALERT))

            await until(has_alerted)
            assert "rank 2 on node-a" in told(ActionKind.ALERT)[0]
            assert (enforcer.asked, publisher.published) == ([], [])
            job_status_source.generation = 0

            async def has_asked() -> bool:
                return bool(enforcer.asked)

            await until(has_asked)
            # Its name for the node, and its places hold on when it is away again.
            assert enforcer.asked[0][0].subject.node == "a"
            job_status_source.generation = -1

            async def says_so() -> bool:
                return caplog.text.count("until it answers") == 2

            await until(says_so)
            assert (await (await get(url, "/v1/overview")).json())["faults"] == {}
        assert len(told(ActionKind.ALERT)) == 1
        assert "Traceback" not in caplog.text

    with caplog.at_level("INFO"):
        asyncio.run(check())


def test_what_an_earlier_run_left_behind_is_not_done_to_the_next() -> None:
    class Next(Teller):
        def job_status(self) -> JobStatus:
            return replace(super().job_status(), began_at_s=time.time() - 2)

    async def check() -> None:
        enforcer, says = Enforcer(), Says(verdict(2, since_s=time.monotonic() - 4))
        parts = DaemonComponents(
            Probe(), SampleReader(PLAN, time.monotonic() - 5), says,
            job_status_source=Next(generation=0), policy=EnforcementPolicy(Mode.RESTART, sustained_s=0.0), enforcer=enforcer,
        )  # fmt: skip
        async with running(settings(), parts):

            async def has_concluded() -> bool:
                return len(says.told) > 5

            await until(has_concluded)
            assert enforcer.asked == []
            says.verdicts = (verdict(3, since_s=time.monotonic()),)

            async def has_asked() -> bool:
                return bool(enforcer.asked)

            await until(has_asked)
        assert [action.ranks for action, _ in enforcer.asked] == [(3,)]

    asyncio.run(check())


def test_a_dead_rank_of_a_later_generation_of_an_earlier_run_deafens_nobody() -> None:
    class Left(SampleReader):
        def read(self) -> list[RingReading]:
            *others, last = super().read()
            records = replace(last.records, is_alive=False)
            return [
                *(replace(one, generation=1) for one in others),
                replace(last, records=records, generation=3),
            ]

    async def check() -> None:
        enforcer, says = Enforcer(), Says(verdict(2, since_s=time.monotonic()))
        parts = DaemonComponents(
            Probe(), Left(PLAN, time.monotonic() - 5), says,
            job_status_source=Teller(generation=1), policy=EnforcementPolicy(Mode.RESTART, sustained_s=0.0), enforcer=enforcer,
        )  # fmt: skip
        async with running(settings(), parts):

            async def has_asked() -> bool:
                return bool(enforcer.asked)

            await until(has_asked)

    asyncio.run(check())


def test_verdict_is_published_written_and_kept_over_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        publisher = Publisher()
        kept = settings(events=tmp_path / "events.jsonl", state=tmp_path / "state.json")
        says = Says(verdict(2, since_s=time.monotonic() - 4))
        parts = DaemonComponents(
            Probe(), SampleReader(PLAN, time.monotonic() - 5), says, publisher=publisher
        )
        async with running(kept, parts) as url:

            async def has_stacks() -> bool:
                told = await (await get(url, "/v1/overview")).json()
                return bool(told["verdicts"]) and "2" in told["verdicts"][0]["stacks"]

            await until(has_stacks)
        assert publisher.published == [says.verdicts]
        assert publisher.closed
        async with running(
            kept, DaemonComponents(Probe(), SampleReader(PLAN, time.monotonic() - 5), says)
        ) as url:
            told = await (await get(url, "/v1/overview")).json()
            assert [entry["number"] for entry in told["verdicts"]] == [1]
            assert time.time() - told["verdicts"][0]["since_s"] > 4
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [line["event_name"] for line in lines] == [
            "keepstep.verdict.opened",
            "keepstep.verdict.stacks",
        ]
        assert lines[0]["severity_text"] == "ERROR"
        assert lines[0]["attributes"]["keepstep.verdict.subject.ranks"] == [2]
        assert lines[0]["resource"]["keepstep.job"] == "run7"

    asyncio.run(check())


def test_a_budget_that_is_spent_is_spent_over_a_restart_of_the_daemon_too(tmp_path: Path) -> None:
    rules = EnforcementPolicy(Mode.RESTART, sustained_s=0.0, restarts=1)

    async def asked(rank: int) -> list[tuple[ActionKind, tuple[int, ...]]]:
        """Return what a daemon that finds this rank hanging asks for until it has concluded often enough."""
        enforcer, says = Enforcer(), Says(verdict(rank, since_s=time.monotonic() - 4))
        parts = DaemonComponents(
            Probe(), SampleReader(PLAN, time.monotonic() - 5), says, policy=rules, enforcer=enforcer
        )
        async with running(settings(state=tmp_path / "state.json"), parts):

            async def has_concluded() -> bool:
                return len(says.told) > 3

            await until(has_concluded)
        return [(action.kind, action.ranks) for action, _ in enforcer.asked]

    async def check() -> None:
        assert await asked(2) == [(ActionKind.RESTART_WORKER, (2,))]
        assert await asked(5) == []
        # Where nothing of it is known any more, the budget is whole again.
        (tmp_path / "state.json").unlink()
        assert await asked(5) == [(ActionKind.RESTART_WORKER, (5,))]

    asyncio.run(check())


def test_parts_that_fail_blind_only_themselves() -> None:
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
            settings(), DaemonComponents(Probe(), None, diagnosis, job_status_source=failing)
        ) as url:

            async def counted() -> bool:
                told = await (await get(url, "/v1/overview")).json()
                return (
                    told["faults"].get("diagnosis", 0) > 1
                    and told["faults"].get("job_status", 0) >= 1
                )

            await until(counted)
        reader: Any = Failing()
        async with running(settings(), DaemonComponents(Probe(), reader, Says())) as url:

            async def read_failed() -> bool:
                return (await (await get(url, "/v1/overview")).json())["faults"].get(
                    "reader", 0
                ) > 1

            await until(read_failed)

    asyncio.run(check())


def test_probe_tells_what_this_machine_tells_and_which_rank_is_stopped() -> None:
    probe = NodeProbe("node-a")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as stopped:
        try:
            os.kill(stopped.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
            workers = {4: os.getpid(), 5: stopped.pid, 6: 2**22 - 1}
            probe.sample(workers)
            told = probe.sample(workers)
        finally:
            stopped.kill()
            probe.close()
    assert told.stopped_ranks == (5,)
    assert 0 < told.memory_available <= told.memory_total
    assert 0 <= told.cpu_share <= 1
    assert told.load > 0
    assert told.node == "node-a"
