"""Real daemons over HTTP: one alone, a tree of three levels, and what happens when parts of them fail."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monitor.daemon.access import bearer_token
from monitor.daemon.assembly import diagnose
from monitor.daemon.contracts import Member, Story
from monitor.daemon.daemon import Parts, Settings
from monitor.daemon.probes import NodeProbe
from monitor.diagnosis.metrics import NodeMetrics
from monitor.diagnosis.policy import Action, ActionKind, Mode, Policy
from monitor.diagnosis.tables import Digest
from monitor.errors import MonitorError
from monitor.records import Communicator
from monitor.verdicts import Syndrome, Verdict
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleReader, SampleTeller, verdict

PLAN = Plan(ranks=8, steps=300, step_s=0.1)


def settings(node: str = "node-a", **more: Any) -> Settings:
    return Settings("run7", node, SECRET, read_every_s=0.05, conclude_every_s=0.1, ask_every_s=0.05, **more)


class Probe:
    def __init__(self) -> None:
        self.closed = False

    def sample(self, workers: Mapping[int, int]) -> NodeMetrics:
        return NodeMetrics("node", time.monotonic(), load=float(len(workers)))

    def close(self) -> None:
        self.closed = True


class Says:
    """A diagnosis that says what it is told to, and keeps what it was given."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = verdicts
        self.told: list[Digest] = []
        self.nodes: dict[int, str] = {}
        self.communicators: dict[int, Communicator] = {}
        self.metrics: list[Any] = []

    def __call__(
        self, told: Digest, communicators: Any, nodes: Any, metrics: Any, past: Any, now_s: float
    ) -> tuple[Any, Sequence[Verdict]]:
        self.told.append(told)
        self.metrics.append(metrics)
        self.nodes, self.communicators = dict(nodes), dict(communicators)
        return (past or 0) + 1, self.verdicts


class Publisher:
    def __init__(self) -> None:
        self.published: list[tuple[Verdict, ...]] = []
        self.closed = False

    def publish(self, verdicts: Sequence[Verdict], generation: int, now_s: float) -> None:
        self.published.append(tuple(verdicts))

    def close(self) -> None:
        self.closed = True


class Enforcer:
    def __init__(self) -> None:
        self.asked: list[tuple[Action, int]] = []

    def enforce(self, action: Action, generation: int) -> bool:
        self.asked.append((action, generation))
        return True

    def close(self) -> None:
        pass


class Teller:
    def __init__(self, generation: int) -> None:
        self.generation = generation

    def story(self) -> Story:
        members = (Member("a", "running", (0, 1, 2, 3), 5, 0), Member("b", "running", (4, 5, 6, 7), 5, 0))
        return Story(0.0, self.generation, members, ())

    def close(self) -> None:
        pass


def test_one_daemon_shows_ranks_steps_and_delays() -> None:
    async def check() -> None:
        reader = SampleReader(PLAN, time.monotonic() - 10)
        async with running(settings(), Parts(Probe(), reader, Says(), teller=SampleTeller(time.time() - 100))) as url:
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
                return found["story"] is not None and 0 < found["story"]["goodput"]["share"] < 1

            await until(has_story)
        assert reader.closed

    asyncio.run(check())


def test_late_rank_is_the_column_that_stands_out() -> None:
    async def check() -> None:
        plan = Plan(ranks=6, steps=100, step_s=0.1, slow={4: 1.6}, slow_link=(1, 2))
        async with running(settings(), Parts(Probe(), SampleReader(plan, time.monotonic() - 10))) as url:
            told = await (await get(url, "/v1/delays")).json()
            waits = [sum(row[j] or 0 for row in told["waiting"]) for j in range(6)]
            assert max(range(6), key=lambda j: waits[j]) == 4
            cells = {(i, j): cell for i, row in enumerate(told["transfer"]) for j, cell in enumerate(row) if cell}
            assert max(cells, key=lambda pair: cells[pair]) == (1, 2)

    asyncio.run(check())


def test_root_over_racks_over_nodes_sees_every_rank_and_diagnoses_at_the_root_only() -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 5
        says = Says(verdict(5))
        async with (
            running(settings("n0"), Parts(Probe(), SampleReader(PLAN, begin_s, "n0", [0, 1, 2]))) as n0,
            running(settings("n1"), Parts(Probe(), SampleReader(PLAN, begin_s, "n1", [3, 4]))) as n1,
            running(settings("n2"), Parts(Probe(), SampleReader(PLAN, begin_s, "n2", [5, 6, 7]))) as n2,
            running(settings("rack0"), Parts(Probe(), children=lambda: (n0, n1))) as rack0,
            running(settings("rack1"), Parts(Probe(), children=lambda: (n2,))) as rack1,
            running(settings("root"), Parts(Probe(), diagnosis=says, children=lambda: (rack0, rack1))) as root,
        ):

            async def complete() -> bool:
                digested = {int(rank) for told in says.told for rank in told.ranks["rank"]}
                return digested == set(range(8)) and len(says.metrics[-1]) == 6

            await until(complete)
            assert [says.nodes[rank] for rank in range(8)] == ["n0"] * 3 + ["n1"] * 2 + ["n2"] * 3
            assert says.communicators[7].ranks == tuple(range(8))
            assert says.metrics[-1]["n0"].load == 3.0
            told = await (await get(root, "/v1/overview")).json()
            assert told["verdicts"][0]["verdict"]["subject"]["ranks"] == [5]
            assert (await (await get(rack0, "/v1/overview")).json())["verdicts"] == []

            async def steps_arrive() -> bool:
                found = await (await get(root, "/v1/overview")).json()
                return all(rank["last_step"] > 40 for rank in found["ranks"])

            await until(steps_arrive)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("plan", "syndrome", "rank"),
    [
        (Plan(ranks=6, steps=200, step_s=0.1, hang=(3, 60)), Syndrome.NON_COMMUNICATION_HANG, 3),
        (Plan(ranks=6, steps=200, step_s=0.1, slow={4: 1.8}, slow_from=60), Syndrome.NON_COMMUNICATION_SLOW, 4),
    ],
)
def test_root_names_the_rank_from_digests_of_digests(plan: Plan, syndrome: Syndrome, rank: int) -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 2
        async with (
            running(settings("n0"), Parts(Probe(), SampleReader(plan, begin_s, "n0", [0, 1]))) as n0,
            running(settings("n1"), Parts(Probe(), SampleReader(plan, begin_s, "n1", [2, 3]))) as n1,
            running(settings("n2"), Parts(Probe(), SampleReader(plan, begin_s, "n2", [4, 5]))) as n2,
            running(settings("rack"), Parts(Probe(), children=lambda: (n0, n1))) as rack,
            running(settings("root"), Parts(Probe(), diagnosis=diagnose, children=lambda: (rack, n2))) as root,
        ):

            async def named() -> bool:
                told = (await (await get(root, "/v1/overview")).json())["verdicts"]
                assert not [one for one in told if one["verdict"]["subject"]["ranks"] != [rank]], told
                return [one["verdict"]["syndrome"] for one in told] == [syndrome]

            await until(named, timeout_s=40)

    asyncio.run(check())


def test_rank_that_moved_to_another_node_is_known_where_it_lives() -> None:
    class Dead(SampleReader):
        def read(self) -> Any:
            return [replace(one, records=replace(one.records, is_alive=False)) for one in super().read()]

    async def check() -> None:
        begin_s = time.monotonic() - 5
        says = Says()
        async with (
            running(settings("old"), Parts(Probe(), Dead(PLAN, begin_s, "old", [0, 1]))) as old,
            running(settings("new"), Parts(Probe(), SampleReader(PLAN, begin_s, "new", [1, 2]))) as new,
            running(settings("root"), Parts(Probe(), diagnosis=says, children=lambda: (old, new))) as root,
        ):

            async def settled() -> bool:
                found = await (await get(root, "/v1/overview")).json()
                return [(r["node"], r["is_alive"]) for r in found["ranks"]] == [
                    ("old", False), ("new", True), ("new", True),
                ]  # fmt: skip

            await until(settled)
            count = len(says.told)

            async def told_more() -> bool:
                return len(says.told) > count + 6

            await until(told_more)
            assert await settled()
            alive = [{int(row["rank"]): bool(row["alive"]) for row in told.ranks} for told in says.told[count + 2 :]]
            assert all(rows.get(1, True) for rows in alive)

    asyncio.run(check())


def test_daemon_that_reads_what_its_child_reads_says_so() -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 5
        async with (
            running(settings("n0"), Parts(Probe(), SampleReader(PLAN, begin_s, "n0", [0, 1]))) as n0,
            running(
                settings("n0"), Parts(Probe(), SampleReader(PLAN, begin_s, "n0", [0]), Says(), children=lambda: (n0,))
            ) as root,
        ):

            async def noticed() -> bool:
                found = await (await get(root, "/v1/overview")).json()
                return "--gather-only" in found["missing"].get(n0, "") and found["ranks_total"] == 2

            await until(noticed)

    asyncio.run(check())


def test_child_that_is_gone_is_named_and_one_of_another_job_is_refused() -> None:
    async def check() -> None:
        reader = SampleReader(PLAN, time.monotonic() - 5, "n0", [0, 1])
        other = Settings("run8", "n1", b"another secret", read_every_s=0.05)
        urls: list[str] = []
        async with running(settings("root"), Parts(Probe(), diagnosis=Says(), children=lambda: tuple(urls))) as root:
            async with running(settings("n0"), Parts(Probe(), reader)) as n0, running(other, Parts(Probe())) as n1:
                urls += [n0, n1]

                async def heard() -> bool:
                    told = await (await get(root, "/v1/overview")).json()
                    return told["ranks_total"] == 2 and "refused our token" in told["missing"].get(n1, "")

                await until(heard)

            async def missed() -> bool:
                told = await (await get(root, "/v1/overview")).json()
                return "no monitor answers" in told["missing"].get(n0, "") and told["ranks_total"] == 2

            await until(missed)

    asyncio.run(check())


@pytest.mark.parametrize("path", ["/v1/summary", "/v1/overview", "/v1/heat", "/v1/stacks/0", "/metrics"])
def test_whoever_lacks_the_token_learns_nothing(path: str) -> None:
    async def check() -> None:
        async with running(settings(), Parts(Probe(), SampleReader(PLAN, time.monotonic()))) as url:
            assert (await get(url, path)).status == 200
            for token in ("", "wrong", bearer_token(b"another secret"), bearer_token(SECRET, "doctor")):
                assert (await get(url, path, token)).status == 401

    asyncio.run(check())


def test_page_without_token_is_for_loopback_by_name_only() -> None:
    async def check() -> None:
        async with running(settings(opens_to_loopback=True), Parts(Probe())) as url:
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
            async with running(settings(host="0.0.0.0", opens_to_loopback=True), Parts(Probe())):
                pass

    asyncio.run(check())


def test_policy_acts_on_the_generation_that_the_verdict_speaks_of_and_on_no_other(tmp_path: Path) -> None:
    async def check() -> None:
        enforcer, publisher, teller = Enforcer(), Publisher(), Teller(generation=1)
        says = Says(verdict(2, since_s=time.monotonic() - 4))
        parts = Parts(
            Probe(), SampleReader(PLAN, time.monotonic() - 5), says,
            publisher=publisher, teller=teller, policy=Policy(Mode.RESTART, sustained_s=0.0), enforcer=enforcer,
        )  # fmt: skip
        async with running(settings(events=tmp_path / "events.jsonl"), parts):

            async def has_concluded() -> bool:
                return len(says.told) > 3

            await until(has_concluded)
            # The rings, which count no generations, are not of the first.
            assert (enforcer.asked, publisher.published) == ([], [])
            teller.generation = 0

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


def test_verdict_is_published_written_and_kept_over_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        publisher = Publisher()
        kept = settings(events=tmp_path / "events.jsonl", state=tmp_path / "state.json")
        says = Says(verdict(2, since_s=time.monotonic() - 4))
        parts = Parts(Probe(), SampleReader(PLAN, time.monotonic() - 5), says, publisher=publisher)
        async with running(kept, parts) as url:

            async def has_stacks() -> bool:
                told = await (await get(url, "/v1/overview")).json()
                return bool(told["verdicts"]) and "2" in told["verdicts"][0]["stacks"]

            await until(has_stacks)
        assert publisher.published == [says.verdicts]
        assert publisher.closed
        async with running(kept, Parts(Probe(), SampleReader(PLAN, time.monotonic() - 5), says)) as url:
            told = await (await get(url, "/v1/overview")).json()
            assert [entry["number"] for entry in told["verdicts"]] == [1]
            assert time.time() - told["verdicts"][0]["since_s"] > 4
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [line["event_name"] for line in lines] == ["keepstep.verdict.opened", "keepstep.verdict.stacks"]
        assert lines[0]["severity_text"] == "ERROR"
        assert lines[0]["attributes"]["keepstep.verdict.subject.ranks"] == [2]
        assert lines[0]["resource"]["keepstep.job"] == "run7"

    asyncio.run(check())


def test_parts_that_fail_blind_only_themselves() -> None:
    class Failing:
        def read(self) -> Any:
            raise OSError("no such ring")

        def story(self) -> Any:
            raise RuntimeError("no coordinator")

        def close(self) -> None:
            raise RuntimeError("cannot even close")

    def diagnosis(*_: Any) -> Any:
        raise ZeroDivisionError

    async def check() -> None:
        failing: Any = Failing()
        async with running(settings(), Parts(Probe(), None, diagnosis, teller=failing)) as url:

            async def counted() -> bool:
                told = await (await get(url, "/v1/overview")).json()
                return told["faults"].get("diagnosis", 0) > 1 and told["faults"].get("story", 0) >= 1

            await until(counted)
        reader: Any = Failing()
        async with running(settings(), Parts(Probe(), reader, Says())) as url:

            async def read_failed() -> bool:
                return (await (await get(url, "/v1/overview")).json())["faults"].get("reader", 0) > 1

            await until(read_failed)

    asyncio.run(check())


def test_stacks_of_a_rank_two_daemons_away_are_those_of_its_process() -> None:
    program = (
        "import time\ndef waits_for_nobody():\n    print('ready', flush=True)\n    time.sleep(1000)\nwaits_for_nobody()"
    )

    async def check(pid: int) -> None:
        reader = SampleReader(PLAN, time.monotonic() - 2, "n0", [0], pids={0: pid})
        async with (
            running(settings("n0"), Parts(Probe(), reader)) as n0,
            running(settings("rack"), Parts(Probe(), children=lambda: (n0,))) as rack,
            running(settings("root"), Parts(Probe(), diagnosis=Says(), children=lambda: (rack,))) as root,
        ):

            async def known() -> bool:
                return (await (await get(root, "/v1/overview")).json())["ranks_total"] == 1

            await until(known)
            told = await (await get(root, "/v1/stacks/0")).json()
            frames = [frame for thread in told["threads"] for frame in thread["frames"]]
            assert any("waits_for_nobody" in frame for frame in frames)
            assert "no daemon below knows rank 9" in (await (await get(root, "/v1/stacks/9")).json())["error"]

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            asyncio.run(check(process.pid))
        finally:
            process.kill()


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
