"""Trees of real daemons over HTTP: who hears what of whom, and in whose time."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from keepstep.monitor.daemon.assembly import diagnose
from keepstep.monitor.daemon.daemon import DaemonComponents, Settings
from keepstep.monitor.records import Phase
from keepstep.monitor.secret import bearer_token
from keepstep.monitor.telemetry.clocks import align
from keepstep.monitor.tree.node_clocks import NodeClock, encode_clocks
from keepstep.monitor.verdicts import Syndrome
from keepstep.monitor.watch.watch import Watch
from tests.integration.monitor.parts import PLAN, Probe, Says, settings
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleReader, verdict


def test_root_over_racks_over_nodes_sees_every_rank_and_diagnoses_at_the_root_only() -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 5
        says = Says(verdict(5))
        async with (
            running(
                settings("n0"),
                DaemonComponents(Probe(), SampleReader(PLAN, begin_s, "n0", [0, 1, 2])),
            ) as n0,
            running(
                settings("n1"), DaemonComponents(Probe(), SampleReader(PLAN, begin_s, "n1", [3, 4]))
            ) as n1,
            running(
                settings("n2"),
                DaemonComponents(Probe(), SampleReader(PLAN, begin_s, "n2", [5, 6, 7])),
            ) as n2,
            running(
                settings("rack0"), DaemonComponents(Probe(), children=lambda: (n0, n1))
            ) as rack0,
            running(settings("rack1"), DaemonComponents(Probe(), children=lambda: (n2,))) as rack1,
            running(
                settings("root"),
                DaemonComponents(Probe(), diagnosis=says, children=lambda: (rack0, rack1)),
            ) as root,
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
        (
            Plan(ranks=6, steps=200, step_s=0.1, slow={4: 1.8}, slow_from=60),
            Syndrome.NON_COMMUNICATION_SLOW,
            4,
        ),
    ],
)
def test_root_names_the_rank_from_digests_of_digests(
    plan: Plan, syndrome: Syndrome, rank: int
) -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 2
        async with (
            running(
                settings("n0"), DaemonComponents(Probe(), SampleReader(plan, begin_s, "n0", [0, 1]))
            ) as n0,
            running(
                settings("n1"), DaemonComponents(Probe(), SampleReader(plan, begin_s, "n1", [2, 3]))
            ) as n1,
            running(
                settings("n2"), DaemonComponents(Probe(), SampleReader(plan, begin_s, "n2", [4, 5]))
            ) as n2,
            running(settings("rack"), DaemonComponents(Probe(), children=lambda: (n0, n1))) as rack,
            running(
                settings("root"),
                DaemonComponents(Probe(), diagnosis=diagnose, children=lambda: (rack, n2)),
            ) as root,
        ):

            async def named() -> bool:
                told = (await (await get(root, "/v1/overview")).json())["verdicts"]
                assert not [one for one in told if one["verdict"]["subject"]["ranks"] != [rank]], (
                    told
                )
                return [one["verdict"]["syndrome"] for one in told] == [syndrome]

            await until(named, timeout_s=40)

    asyncio.run(check())


def test_rank_that_moved_to_another_node_is_known_where_it_lives() -> None:
    class Dead(SampleReader):
        def read(self) -> Any:
            return [
                replace(one, records=replace(one.records, is_alive=False)) for one in super().read()
            ]

    async def check() -> None:
        begin_s = time.monotonic() - 5
        says = Says()
        async with (
            running(
                settings("old"), DaemonComponents(Probe(), Dead(PLAN, begin_s, "old", [0, 1]))
            ) as old,
            running(
                settings("new"),
                DaemonComponents(Probe(), SampleReader(PLAN, begin_s, "new", [1, 2])),
            ) as new,
            running(
                settings("root"),
                DaemonComponents(Probe(), diagnosis=says, children=lambda: (old, new)),
            ) as root,
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
            alive = [
                {int(row["rank"]): bool(row["alive"]) for row in told.ranks}
                for told in says.told[count + 2 :]
            ]
            assert all(rows.get(1, True) for rows in alive)

    asyncio.run(check())


def test_ranks_of_an_earlier_launch_that_a_node_still_has_are_forgotten_everywhere() -> None:
    """The next launch is on one node of the two, of half as many ranks, and of fewer steps."""

    class Launched(SampleReader):
        def __init__(self, plan: Plan, begin_s: float, node: str, ranks: list[int]) -> None:
            super().__init__(plan, begin_s, node, ranks)
            self.created_s, self.size, self.alive = begin_s, plan.ranks, True

        def read(self) -> Any:
            return [
                replace(
                    one, records=replace(one.records, is_alive=self.alive), world_size=self.size,
                    created_s=self.created_s, incarnation=str(self.created_s),
                )
                for one in super().read()
            ]  # fmt: skip

    now_s = time.monotonic()
    whole = Plan(ranks=4, steps=400, step_s=0.1)
    old = [
        Launched(whole, now_s - 60, node, ranks) for node, ranks in (("a", [0, 1]), ("b", [2, 3]))
    ]
    new = Launched(Plan(ranks=2, steps=400, step_s=0.1), now_s - 5, "a", [0, 1])
    below = {one.node: Watch(one.node, one, Probe(), None) for one in old}
    root = Watch("root", None, Probe(), diagnose)

    def told(readers: Sequence[Launched], order: Sequence[str]) -> tuple[list[int], int]:
        for reader in readers:
            below[reader.node] = Watch(reader.node, reader, Probe(), None)
        for node in order:
            below[node].read()
            below[node].digest()
            root.receive(node, below[node].summary(*root.child_registry.cursor(node), 256))
        root.digest()
        turn = root.diagnose()
        assert turn is not None
        assert turn.verdicts == ()
        return [kept.state.rank for kept in root.ranks()], root.heat(40, 64, Phase.STEP).steps[-1]

    ranks, newest = told(old, "ab")
    assert (ranks, newest > 100) == ([0, 1, 2, 3], True)
    for one in old:
        one.alive = False
    for order in ("ab", "ba"):
        ranks, newest = told([new], order)
        assert (ranks, newest < 300) == ([0, 1], True)
        assert set(root.tables) == {0, 1}
    # Nor do they come back when all ranks of the new launch have died.
    new.alive = False
    below["a"].read()
    root.receive("a", below["a"].summary(*root.child_registry.cursor("a"), 256))
    root.receive("b", below["b"].summary(*root.child_registry.cursor("b"), 256))
    assert [kept.state.rank for kept in root.ranks()] == [0, 1]


def test_daemon_that_reads_what_its_child_reads_says_so() -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 5
        async with (
            running(
                settings("n0"), DaemonComponents(Probe(), SampleReader(PLAN, begin_s, "n0", [0, 1]))
            ) as n0,
            running(
                settings("n0"),
                DaemonComponents(
                    Probe(), SampleReader(PLAN, begin_s, "n0", [0]), Says(), children=lambda: (n0,)
                ),
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
        async with running(
            settings("root"),
            DaemonComponents(Probe(), diagnosis=Says(), children=lambda: tuple(urls)),
        ) as root:
            async with (
                running(settings("n0"), DaemonComponents(Probe(), reader)) as n0,
                running(other, DaemonComponents(Probe())) as n1,
            ):
                urls += [n0, n1]

                async def heard() -> bool:
                    told = await (await get(root, "/v1/overview")).json()
                    return told["ranks_total"] == 2 and "refused our token" in told["missing"].get(
                        n1, ""
                    )

                await until(heard)

            async def missed() -> bool:
                told = await (await get(root, "/v1/overview")).json()
                return (
                    "no monitor answers" in told["missing"].get(n0, "") and told["ranks_total"] == 2
                )

            await until(missed)

    asyncio.run(check())


def test_stacks_of_a_rank_two_daemons_away_are_those_of_its_process() -> None:
    program = "import time\ndef waits_for_nobody():\n    print('ready', flush=True)\n    time.sleep(1000)\nwaits_for_nobody()"

    async def check(pid: int) -> None:
        reader = SampleReader(PLAN, time.monotonic() - 2, "n0", [0], pids={0: pid})
        async with (
            running(settings("n0"), DaemonComponents(Probe(), reader)) as n0,
            running(settings("rack"), DaemonComponents(Probe(), children=lambda: (n0,))) as rack,
            running(
                settings("root"),
                DaemonComponents(Probe(), diagnosis=Says(), children=lambda: (rack,)),
            ) as root,
        ):

            async def known() -> bool:
                return (await (await get(root, "/v1/overview")).json())["ranks_total"] == 1

            await until(known)
            told = await (await get(root, "/v1/stacks/0")).json()
            frames = [frame for thread in told["threads"] for frame in thread["frames"]]
            assert any("waits_for_nobody" in frame for frame in frames)
            assert (
                "no daemon below knows rank 9"
                in (await (await get(root, "/v1/stacks/9")).json())["error"]
            )

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            asyncio.run(check(process.pid))
        finally:
            process.kill()


@pytest.mark.parametrize("levels", [1, 2])
def test_digests_are_made_in_the_jobs_time_however_nodes_clocks_differ(levels: int) -> None:
    ahead_s = {"n0": 500.0, "n1": -2000.0}

    def reader(node: str, rank: int) -> SampleReader:
        return SampleReader(
            PLAN,
            begin_s + ahead_s[node],
            node,
            [rank],
            clock=lambda: time.monotonic() + ahead_s[node],
        )

    begin_s = time.monotonic() - 5

    async def check() -> None:
        says = Says()
        async with AsyncExitStack() as stack:
            below = tuple([
                await stack.enter_async_context(running(settings(node), DaemonComponents(Probe(), reader(node, rank))))
                for rank, node in enumerate(ahead_s)
            ])  # fmt: skip
            for level in range(1, levels):
                rack = DaemonComponents(Probe(), children=partial(tuple, below))
                below = (await stack.enter_async_context(running(settings(f"rack{level}"), rack)),)
            root = DaemonComponents(
                Probe(), diagnosis=says, alignment=align, children=lambda: below
            )
            await stack.enter_async_context(running(settings("root"), root))

            async def is_aligned() -> bool:
                ranks = [told.ranks for told in says.told if len(told.ranks) == 2]
                return bool(ranks) and bool(np.isfinite(ranks[-1]["offset_error_s"]).all())

            await until(is_aligned)
            rows = [told.ranks for told in says.told if len(told.ranks) == 2][-1]
            assert rows["offset_s"][1] - rows["offset_s"][0] == pytest.approx(2500.0, abs=0.1)
            assert rows["offset_error_s"].max() < 0.1
            # The root's clock is the job's, though it runs no ranks and knows only how late news come.
            assert rows["offset_s"][0] == pytest.approx(-500.0, abs=2.0)

    asyncio.run(check())


def test_root_outlives_a_child_that_is_something_else() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="Please log in. " * 10_000)

    async def check() -> None:
        served = web.Application()
        served.router.add_route("*", "/{any:.*}", answer)
        runner = web.AppRunner(served, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            below = (f"http://127.0.0.1:{port}",)
            reader = SampleReader(PLAN, time.monotonic() - 5, "root", [0])
            async with (
                running(
                    settings("n1"),
                    DaemonComponents(Probe(), SampleReader(PLAN, time.monotonic() - 5, "n1", [1])),
                ) as other,
                running(
                    settings("root", align_every_s=0.1),
                    DaemonComponents(
                        Probe(), reader, Says(), align, children=lambda: (*below, other)
                    ),
                ) as root,
            ):
                asked = 0

                async def is_asked_on() -> bool:
                    nonlocal asked
                    told = await (await get(root, "/v1/overview")).json()
                    asked += "no monitor's summary" in told["missing"].get(below[0], "")
                    return asked >= 10

                await until(is_asked_on)
        finally:
            await runner.cleanup()

    asyncio.run(check())


def test_clocks_that_are_none_are_refused_and_pages_without_token_may_not_set_them() -> None:
    async def post(url: str, body: bytes, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            return answer.status

    async def check() -> None:
        async with running(settings(opens_to_loopback=True), DaemonComponents(Probe())) as url:
            good = encode_clocks({"n0": NodeClock(1.0, 0.1)})
            assert await post(f"{url}/v1/clocks", good, "") == 401
            assert await post(f"{url}/v1/clocks", good, bearer_token(SECRET)) == 204
            for bad in (
                b"",
                b"[]",
                b'{"n0": [1.0]}',
                b'{"n0": [NaN, 0.1]}',
                b'{"n0": [0, Infinity]}',
                b'{"n0": [0, -1]}',
            ):
                assert await post(f"{url}/v1/clocks", bad, bearer_token(SECRET)) == 400

    asyncio.run(check())
