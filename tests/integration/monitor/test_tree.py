"""Claims about trees of real daemons over HTTP: summaries, digests, stacks and clock offsets."""

import asyncio
import gzip
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from keepstep.monitor.daemon.assembly import diagnose
from keepstep.monitor.daemon.settings import DaemonComponents, Settings
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.records import Phase
from keepstep.monitor.secret import bearer_token
from keepstep.monitor.telemetry.clocks import ClockOffset, align
from keepstep.monitor.tree.child_registry import Cursor
from keepstep.monitor.tree.monitor_client import MonitorClient
from keepstep.monitor.tree.node_clocks import encode_clocks
from keepstep.monitor.verdicts import Syndrome
from keepstep.monitor.views.service import _authorization
from keepstep.monitor.watch.watch import Watch
from tests.adaptive_timeouts import patient
from tests.integration.monitor.parts import PLAN, FixedDiagnosis, Probe, settings
from tests.integration.monitor.running import SECRET, get, running, until
from tests.integration.monitor.sample import Plan, SampleReader, verdict


def cursor_of(watch: Watch, url: str) -> Cursor:
    return watch.child_registry.cursors([url], 1)[url]


def test_root_of_racks_of_nodes_receives_every_rank_and_alone_diagnoses() -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 5
        diagnosis = FixedDiagnosis(verdict(5))
        async with (
            running(
                settings("n0"),
                DaemonComponents(
                    probe=Probe(), reader=SampleReader(PLAN, begin_s, "n0", [0, 1, 2])
                ),
            ) as n0,
            running(
                settings("n1"),
                DaemonComponents(probe=Probe(), reader=SampleReader(PLAN, begin_s, "n1", [3, 4])),
            ) as n1,
            running(
                settings("n2"),
                DaemonComponents(
                    probe=Probe(), reader=SampleReader(PLAN, begin_s, "n2", [5, 6, 7])
                ),
            ) as n2,
            running(
                settings("rack0"), DaemonComponents(probe=Probe(), children=lambda: (n0, n1))
            ) as rack0,
            running(
                settings("rack1"), DaemonComponents(probe=Probe(), children=lambda: (n2,))
            ) as rack1,
            running(
                settings("root"),
                DaemonComponents(
                    probe=Probe(), diagnosis=diagnosis, children=lambda: (rack0, rack1)
                ),
            ) as root,
        ):

            async def complete() -> bool:
                digested = {
                    int(rank) for digest in diagnosis.digests for rank in digest.ranks["rank"]
                }
                return digested == set(range(8)) and len(diagnosis.metrics[-1]) == 6

            await until(complete)
            assert [diagnosis.nodes[rank] for rank in range(8)] == ["n0"] * 3 + ["n1"] * 2 + [
                "n2"
            ] * 3
            assert diagnosis.communicators[7].ranks == tuple(range(8))
            assert diagnosis.metrics[-1]["n0"].load == 3.0
            overview = await (await get(root, "/v1/overview")).json()
            assert overview["verdicts"][0]["verdict"]["subject"]["ranks"] == [5]
            assert (await (await get(rack0, "/v1/overview")).json())["verdicts"] == []

            async def steps_arrive() -> bool:
                overview = await (await get(root, "/v1/overview")).json()
                return all(rank["last_step"] > 40 for rank in overview["ranks"])

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
def test_root_identifies_the_rank_from_merged_digests(
    plan: Plan, syndrome: Syndrome, rank: int
) -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 2
        async with (
            running(
                settings("n0"),
                DaemonComponents(probe=Probe(), reader=SampleReader(plan, begin_s, "n0", [0, 1])),
            ) as n0,
            running(
                settings("n1"),
                DaemonComponents(probe=Probe(), reader=SampleReader(plan, begin_s, "n1", [2, 3])),
            ) as n1,
            running(
                settings("n2"),
                DaemonComponents(probe=Probe(), reader=SampleReader(plan, begin_s, "n2", [4, 5])),
            ) as n2,
            running(
                settings("rack"), DaemonComponents(probe=Probe(), children=lambda: (n0, n1))
            ) as rack,
            running(
                settings("root"),
                DaemonComponents(probe=Probe(), diagnosis=diagnose, children=lambda: (rack, n2)),
            ) as root,
        ):

            async def is_identified() -> bool:
                entries = (await (await get(root, "/v1/overview")).json())["verdicts"]
                verdicts = [entry["verdict"] for entry in entries]
                assert all(verdict["subject"]["ranks"] == [rank] for verdict in verdicts), entries
                return [verdict["syndrome"] for verdict in verdicts] == [syndrome]

            await until(is_identified, timeout_s=40)

    asyncio.run(check())


def test_rank_that_moved_to_another_node_is_shown_on_that_node() -> None:
    class Dead(SampleReader):
        def read(self) -> Any:
            return [
                replace(one, records=replace(one.records, is_alive=False)) for one in super().read()
            ]

    async def check() -> None:
        begin_s = time.monotonic() - 5
        diagnosis = FixedDiagnosis()
        async with (
            running(
                settings("old"),
                DaemonComponents(probe=Probe(), reader=Dead(PLAN, begin_s, "old", [0, 1])),
            ) as old,
            running(
                settings("new"),
                DaemonComponents(probe=Probe(), reader=SampleReader(PLAN, begin_s, "new", [1, 2])),
            ) as new,
            running(
                settings("root"),
                DaemonComponents(probe=Probe(), diagnosis=diagnosis, children=lambda: (old, new)),
            ) as root,
        ):

            async def settled() -> bool:
                overview = await (await get(root, "/v1/overview")).json()
                return [(r["node"], r["is_alive"]) for r in overview["ranks"]] == [
                    ("old", False), ("new", True), ("new", True),
                ]  # fmt: skip

            await until(settled)
            count = len(diagnosis.digests)
            await until(lambda: len(diagnosis.digests) > count + 6)
            assert await settled()
            alive = [
                {int(row["rank"]): bool(row["alive"]) for row in digest.ranks}
                for digest in diagnosis.digests[count + 2 :]
            ]
            assert all(rows.get(1, True) for rows in alive)

    asyncio.run(check())


def test_ranks_of_an_earlier_launch_that_a_node_still_has_are_dropped() -> None:
    """The next launch is on one of the two nodes, with half as many ranks and fewer steps."""

    class Launched(SampleReader):
        def __init__(self, plan: Plan, begin_s: float, node: str, ranks: list[int]) -> None:
            super().__init__(plan, begin_s, node, ranks, clock=lambda: now_s)
            self.created_s, self.size, self.alive = begin_s, plan.ranks, True

        def read(self) -> Any:
            return [
                replace(
                    one, records=replace(one.records, is_alive=self.alive), world_size=self.size,
                    created_s=self.created_s, incarnation=str(self.created_s),
                )
                for one in super().read()
            ]  # fmt: skip

    # However long the test takes, no time passes for the job: it has the steps of this moment.
    now_s = time.monotonic()
    watch = partial(Watch, probe=Probe(), now_s=lambda: now_s)
    plan = Plan(ranks=4, steps=400, step_s=0.1)
    old = [
        Launched(plan, now_s - 60, node, ranks) for node, ranks in (("a", [0, 1]), ("b", [2, 3]))
    ]
    new = Launched(Plan(ranks=2, steps=400, step_s=0.1), now_s - 5, "a", [0, 1])
    below = {reader.node: watch(reader.node, reader, diagnosis=None) for reader in old}
    root = watch("root", None, diagnosis=diagnose)

    def diagnosed(readers: Sequence[Launched], order: Sequence[str]) -> tuple[list[int], int]:
        """Return the ranks and the newest step at the root after a round of new readers."""
        for reader in readers:
            below[reader.node] = watch(reader.node, reader, diagnosis=None)
        for node in order:
            below[node].read()
            below[node].digest()
            root.receive(node, below[node].summary(cursor_of(root, node), 256))
        root.digest()
        turn = root.diagnose()
        assert turn is not None
        assert turn.verdicts == ()
        ranks = [history.state.rank for history in root.rank_views.ranks()]
        return ranks, root.rank_views.heat(40, 64, Phase.STEP).steps[-1]

    ranks, newest = diagnosed(old, "ab")
    assert (ranks, newest > 100) == ([0, 1, 2, 3], True)
    for reader in old:
        reader.alive = False
    for order in ("ab", "ba"):
        ranks, newest = diagnosed([new], order)
        assert (ranks, newest < 300) == ([0, 1], True)
        assert set(root.rank_views.tables) == {0, 1}
    # They do not reappear when all ranks of the new launch have died.
    new.alive = False
    below["a"].read()
    root.receive("a", below["a"].summary(cursor_of(root, "a"), 256))
    root.receive("b", below["b"].summary(cursor_of(root, "b"), 256))
    root.digest()
    assert [history.state.rank for history in root.rank_views.ranks()] == [0, 1]


def test_rank_that_daemon_and_child_both_read_is_reported_with_the_remedy() -> None:
    async def check() -> None:
        begin_s = time.monotonic() - 5
        async with (
            running(
                settings("n0"),
                DaemonComponents(probe=Probe(), reader=SampleReader(PLAN, begin_s, "n0", [0, 1])),
            ) as n0,
            running(
                settings("n0"),
                DaemonComponents(
                    probe=Probe(),
                    reader=SampleReader(PLAN, begin_s, "n0", [0]),
                    diagnosis=FixedDiagnosis(),
                    children=lambda: (n0,),
                ),
            ) as root,
        ):

            async def noticed() -> bool:
                overview = await (await get(root, "/v1/overview")).json()
                return (
                    "--gather-only" in overview["missing"].get(n0, "")
                    and overview["ranks_total"] == 2
                )

            await until(noticed)

    asyncio.run(check())


def test_child_that_is_gone_is_listed_as_missing_and_one_of_another_job_refuses() -> None:
    async def check() -> None:
        reader = SampleReader(PLAN, time.monotonic() - 5, "n0", [0, 1])
        other = Settings(job="run8", node="n1", secret=b"another secret", read_every_s=0.05)
        urls: list[str] = []
        async with running(
            settings("root"),
            DaemonComponents(
                probe=Probe(), diagnosis=FixedDiagnosis(), children=lambda: tuple(urls)
            ),
        ) as root:
            async with (
                running(settings("n0"), DaemonComponents(probe=Probe(), reader=reader)) as n0,
                running(other, DaemonComponents(probe=Probe())) as n1,
            ):
                urls += [n0, n1]

                async def has_ranks() -> bool:
                    overview = await (await get(root, "/v1/overview")).json()
                    return overview["ranks_total"] == 2 and "another secret" in overview[
                        "missing"
                    ].get(n1, "")

                await until(has_ranks)

            async def missed() -> bool:
                overview = await (await get(root, "/v1/overview")).json()
                return (
                    "no monitor answers" in overview["missing"].get(n0, "")
                    and overview["ranks_total"] == 2
                )

            await until(missed)

    asyncio.run(check())


def test_stacks_of_a_rank_two_daemons_away_are_those_of_its_process() -> None:
    program = (
        "import time\n"
        "def sleeping_function():\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(1000)\n"
        "sleeping_function()"
    )

    async def check(pid: int) -> None:
        reader = SampleReader(PLAN, time.monotonic() - 2, "n0", [0], pids={0: pid})
        async with (
            running(settings("n0"), DaemonComponents(probe=Probe(), reader=reader)) as n0,
            running(
                settings("rack"), DaemonComponents(probe=Probe(), children=lambda: (n0,))
            ) as rack,
            running(
                settings("root"),
                DaemonComponents(
                    probe=Probe(), diagnosis=FixedDiagnosis(), children=lambda: (rack,)
                ),
            ) as root,
        ):

            async def known() -> bool:
                return (await (await get(root, "/v1/overview")).json())["ranks_total"] == 1

            await until(known)
            stacks = await (await get(root, "/v1/stacks/0")).json()
            frames = [frame for thread in stacks["threads"] for frame in thread["frames"]]
            assert any("sleeping_function" in frame for frame in frames)
            unknown = await (await get(root, "/v1/stacks/9")).json()
            assert "rank 9 is not known" in unknown["error"]

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            asyncio.run(check(process.pid))
        finally:
            process.kill()


@pytest.mark.parametrize("levels", [1, 2])
def test_digests_are_in_the_jobs_time_though_nodes_clocks_differ(levels: int) -> None:
    # Ahead, both: a clock that is behind a machine's that has just started would be below zero.
    ahead_s = {"n0": 3000.0, "n1": 500.0}

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
        diagnosis = FixedDiagnosis()
        async with AsyncExitStack() as stack:
            below: tuple[str, ...] = ()
            for rank, node in enumerate(ahead_s):
                leaf = DaemonComponents(probe=Probe(), reader=reader(node, rank))
                below += (await stack.enter_async_context(running(settings(node), leaf)),)
            for level in range(1, levels):
                rack = DaemonComponents(probe=Probe(), children=partial(tuple, below))
                below = (await stack.enter_async_context(running(settings(f"rack{level}"), rack)),)
            root = DaemonComponents(
                probe=Probe(), diagnosis=diagnosis, alignment=align, children=lambda: below
            )
            await stack.enter_async_context(running(settings("root"), root))

            async def is_aligned() -> bool:
                ranks = [digest.ranks for digest in diagnosis.digests if len(digest.ranks) == 2]
                return bool(ranks) and ranks[-1]["offset_error_s"].max() < 0.1

            await until(is_aligned)
            rows = [digest.ranks for digest in diagnosis.digests if len(digest.ranks) == 2][-1]
            assert rows["offset_s"][1] - rows["offset_s"][0] == pytest.approx(2500.0, abs=0.1)
            # The root's clock is the job's, though it runs no ranks and only knows report delays.
            assert rows["offset_s"][0] == pytest.approx(-3000.0, abs=patient(2))

    asyncio.run(check())


def test_root_survives_a_child_that_is_another_program() -> None:
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
                    DaemonComponents(
                        probe=Probe(), reader=SampleReader(PLAN, time.monotonic() - 5, "n1", [1])
                    ),
                ) as other,
                running(
                    settings("root", align_every_s=0.1),
                    DaemonComponents(
                        probe=Probe(),
                        reader=reader,
                        diagnosis=FixedDiagnosis(),
                        alignment=align,
                        children=lambda: (*below, other),
                    ),
                ) as root,
            ):
                rounds = 0

                async def is_polled_further() -> bool:
                    nonlocal rounds
                    overview = await (await get(root, "/v1/overview")).json()
                    rounds += "does not know this job's secret" in overview["missing"].get(
                        below[0], ""
                    )
                    return rounds >= 10

                await until(is_polled_further)
        finally:
            await runner.cleanup()

    asyncio.run(check())


@asynccontextmanager
async def answering(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], secret: bytes | None
) -> AsyncIterator[str]:
    """Serve one answer to everything; with a secret, signed as a daemon's."""
    middlewares = [] if secret is None else [_authorization(secret, False, lambda _: None)]
    served = web.Application(middlewares=middlewares)
    served.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(served, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_what_listens_at_a_childs_address_learns_nothing_that_another_daemon_accepts() -> None:
    seen: list[str] = []

    async def check() -> None:
        async with running(settings("n1"), DaemonComponents(probe=Probe())) as real:
            async with aiohttp.ClientSession() as session, session.get(f"{real}/v1/heat") as first:
                challenge = first.headers["Keepstep-Challenge"]

            async def record(request: web.Request) -> web.Response:
                # It passes on the real daemon's challenge, to be given what that one accepts.
                seen.append(request.headers["Authorization"])
                return web.Response(status=401, headers={"Keepstep-Challenge": challenge})

            async with (
                answering(record, None) as impostor,
                running(
                    settings("root"),
                    DaemonComponents(
                        probe=Probe(), diagnosis=FixedDiagnosis(), children=lambda: (impostor,)
                    ),
                ),
            ):
                await until(lambda: len(seen) >= 3)
            async with aiohttp.ClientSession() as session:
                for header in seen:
                    for path in ("/v1/overview", "/v1/stacks/0", "/metrics"):
                        async with session.get(
                            real + path, headers={"Authorization": header}
                        ) as answer:
                            assert answer.status == 401

    asyncio.run(check())
    assert not any(bearer_token(SECRET) in header for header in seen)


def test_unsigned_summary_is_not_believed() -> None:
    """Nobody can forge verdicts by listening at a child's address."""

    async def check() -> None:
        reader = SampleReader(PLAN, time.monotonic() - 5, "n1", [1])
        async with running(settings("n1"), DaemonComponents(probe=Probe(), reader=reader)) as real:
            client = MonitorClient(SECRET)
            stolen = await client.ask("GET", f"{real}/v1/summary?since=0", 5.0, 1 << 24)
            await client.close()

            async def forge(_: web.Request) -> web.Response:
                return web.Response(body=stolen)

            async with (
                answering(forge, None) as impostor,
                running(
                    settings("root"),
                    DaemonComponents(
                        probe=Probe(), diagnosis=FixedDiagnosis(), children=lambda: (impostor,)
                    ),
                ) as root,
            ):

                async def is_refused() -> bool:
                    overview = await (await get(root, "/v1/overview")).json()
                    assert overview["ranks_total"] == 0
                    return "does not know this job's secret" in overview["missing"].get(
                        impostor, ""
                    )

                await until(is_refused)

    asyncio.run(check())


def test_compressed_answers_are_refused_before_they_are_expanded() -> None:
    async def bomb(_: web.Request) -> web.Response:
        data = gzip.compress(bytes(1 << 26))
        return web.Response(body=data, headers={"Content-Encoding": "gzip"})

    async def check() -> None:
        async with answering(bomb, SECRET) as url:
            client = MonitorClient(SECRET)
            with pytest.raises(ProtocolViolation, match="compresses"):
                await client.ask("GET", f"{url}/v1/summary", patient(5.0), 1 << 30)
            await client.close()

    asyncio.run(check())


def test_root_goes_on_when_a_childs_summary_cannot_be_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding refuses what it can; a defect in merging must not end the tree either."""
    merge = Watch.receive

    def fail_for_n0(watch: Watch, url: str, summary: Any) -> None:
        if summary.incarnation.startswith("n0"):
            raise KeyError("a defect")
        merge(watch, url, summary)

    monkeypatch.setattr(Watch, "receive", fail_for_n0)

    async def check() -> None:
        async with AsyncExitStack() as stack:
            urls = [
                await stack.enter_async_context(
                    running(
                        settings(f"n{node}"),
                        DaemonComponents(
                            probe=Probe(),
                            reader=SampleReader(PLAN, time.monotonic() - 5, f"n{node}", [node]),
                        ),
                    )
                )
                for node in range(2)
            ]
            root = await stack.enter_async_context(
                running(
                    settings("root"),
                    DaemonComponents(
                        probe=Probe(), diagnosis=FixedDiagnosis(), children=lambda: tuple(urls)
                    ),
                )
            )

            async def shows_the_other() -> bool:
                overview = await (await get(root, "/v1/overview")).json()
                return overview["ranks_total"] == 1 and "could not be merged" in overview[
                    "missing"
                ].get(urls[0], "")

            await until(shows_the_other)

    asyncio.run(check())


def test_invalid_clock_offsets_are_refused_and_setting_them_requires_the_token() -> None:
    async def post(url: str, body: bytes, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            return answer.status

    async def check() -> None:
        async with running(
            settings(opens_to_loopback=True), DaemonComponents(probe=Probe())
        ) as url:
            good = encode_clocks({"n0": ClockOffset(1.0, 0.1)})
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
