"""Claims about torchrun agents' rounds: members, losses, ends, over a coordinator in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.elastic.agent import worker_group
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys, View, from_listing
from keepstep.elastic.store.contract import Put
from keepstep.elastic.store.memory import MemoryStore
from keepstep.elastic.torchrun.node import TorchrunNode
from keepstep.elastic.torchrun.rounds import Closed, TimedOut
from keepstep.elastic.torchrun.settings import Settings, parse_settings
from keepstep.elastic.torchrun.workers import Place
from keepstep.elastic.worker.launched_session import VARIABLE
from tests.adaptive_timeouts import patient

pytestmark = pytest.mark.slow

KEYS = Keys("job")
Scenario = Callable[[Callable[["Nodes"], Awaitable[None]]], None]


def settings(nodes: tuple[int, int], workers: int | None = 1, **config: object) -> Settings:
    limits = {"last_call_timeout": patient(60), "lease_ttl_s": 8.0, "join_timeout": patient(60)}
    return parse_settings("h:1", "job", nodes, None, limits | config, {}, workers)


class Nodes:
    """The nodes of one job, in one process; their scripts do not attach."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.store = MemoryStore()
        self.nodes: dict[str, TorchrunNode] = {}

    async def open(self, name: str, nodes: tuple[int, int], **config: Any) -> TorchrunNode:
        directory = self._directory / f"{name}-{len(list(self._directory.iterdir()))}"
        directory.mkdir()
        node = await TorchrunNode.open(
            settings(nodes, **config), self.store, name, "127.0.0.1", directory
        )
        self.nodes[name] = node
        return node

    async def enter(self, *names: str) -> dict[str, Place]:
        """Let nodes take part in the next round."""
        async with asyncio.timeout(patient(60)):
            entered = await asyncio.gather(*(self.nodes[name].enter() for name in names))
        places = {}
        for name, place in zip(names, entered, strict=True):
            assert isinstance(place, Place), place
            if place.listening is not None:
                place.listening.close()
            places[name] = place
        assert sorted(place.rank for place in places.values()) == list(range(len(names)))
        assert {place.size for place in places.values()} == {len(names)}
        return places

    async def view(self) -> View:
        return from_listing(KEYS, await self.store.read(KEYS.prefix))

    async def until_restart(self, generation: int, *names: str) -> str:
        """Wait until torchrun would stop the workers of these nodes; return why."""
        reason = ""
        async with asyncio.timeout(patient(60)):
            for name in names:
                node = self.nodes[name]
                while not (reason := await node.reason_to_restart(generation)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        return reason

    async def end_lease(self, name: str) -> None:
        await self.store.revoke((await self.view()).nodes[name].record.lease)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setattr(worker_group, "_SETTLE_S", 0.0)

    @asynccontextmanager
    async def nodes() -> AsyncIterator[Nodes]:
        them = Nodes(tmp_path)
        try:
            yield them
        finally:
            await asyncio.gather(*(node.leave() for node in them.nodes.values()))

    def play(work: Callable[[Nodes], Awaitable[None]]) -> None:
        async def run() -> None:
            async with nodes() as them:
                await work(them)

        asyncio.run(run())

    return play


def test_lost_node_is_left_out_and_comes_back_with_a_store_of_its_own_for_each_round(
    scenario: Scenario,
) -> None:
    async def work(nodes: Nodes) -> None:
        for name in "ab":
            await nodes.open(name, (1, 2))
        first = await nodes.enter("a", "b")
        await nodes.end_lease("b")
        await nodes.until_restart(1, "a")
        second = await nodes.enter("a")
        # It learns that its lease has ended, joins again, and the other one lets it in.
        await nodes.until_restart(1, "b")
        returning = asyncio.create_task(nodes.nodes["b"].enter())
        await nodes.until_restart(2, "a")
        third = [await nodes.nodes["a"].enter(), await returning]
        assert all(isinstance(place, Place) and place.size == 2 for place in third)
        rounds = [first["a"], second["a"], third[0]]
        assert len({place.store_port for place in rounds if isinstance(place, Place)}) == 3
        assert not await nodes.nodes["a"].reason_to_restart(3)

    scenario(work)


def test_failed_workers_of_one_node_begin_a_round_with_all(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        for name in "ab":
            await nodes.open(name, (2, 2))
        await nodes.enter("a", "b")
        again = asyncio.create_task(nodes.nodes["b"].enter())
        assert await nodes.until_restart(1, "a") == "workers on b have failed"
        place = await nodes.nodes["a"].enter()
        assert isinstance(place, Place)
        assert (place.generation, place.size) == (2, 2)
        assert isinstance(await again, Place)

    scenario(work)


def test_job_whose_nodes_all_died_goes_on_with_those_that_are_started_again(
    scenario: Scenario,
) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.open("a", (1, 1))
        await nodes.enter("a")
        dead = nodes.nodes["a"]
        await nodes.end_lease("a")
        await nodes.open("a", (1, 1))
        places = await nodes.enter("a")
        assert places["a"].generation == 2
        assert await dead.reason_to_restart(1)
        await dead.leave()

    scenario(work)


def test_node_beyond_the_maximum_stands_by_and_takes_a_lost_ones_place(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.open("a", (1, 1))
        await nodes.enter("a")
        await nodes.open("b", (1, 1))
        standing_by = asyncio.create_task(nodes.nodes["b"].enter())
        async with asyncio.timeout(patient(60)):
            while "b" not in (await nodes.view()).nodes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not await nodes.nodes["a"].reason_to_restart(1)
        await nodes.nodes.pop("a").leave()
        taken = await standing_by
        assert isinstance(taken, Place)
        assert (taken.generation, taken.size, taken.rank) == (2, 1, 0)

    scenario(work)


def test_failure_for_good_of_one_node_ends_the_job_for_all(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        for name in "ab":
            await nodes.open(name, (1, 2))
        await nodes.enter("a", "b")
        ending = asyncio.create_task(nodes.nodes["b"].finish(1, RuntimeError()))
        assert "torchrun on b has ended (RuntimeError)" in await nodes.until_restart(1, "a")
        closed = await nodes.nodes["a"].enter()
        assert isinstance(closed, Closed)
        assert "torchrun on b has ended" in closed.reason
        await ending
        await asyncio.gather(*(nodes.nodes.pop(name).leave() for name in "ab"))
        assert (await nodes.store.read(KEYS.prefix)).items == ()

    scenario(work)


def test_success_ends_the_job_once_the_workers_of_all_nodes_have_finished(
    scenario: Scenario,
) -> None:
    async def work(nodes: Nodes) -> None:
        for name in "ab":
            await nodes.open(name, (1, 2))
        await nodes.enter("a", "b")
        first = asyncio.create_task(nodes.nodes["b"].finish(1, None))
        done, _ = await asyncio.wait({first}, timeout=1.0)
        assert not done
        assert not await nodes.nodes["a"].reason_to_restart(1)
        await nodes.nodes["a"].finish(1, None)
        await first
        assert (await nodes.store.read(KEYS.prefix)).items == ()

    scenario(work)


def test_job_ends_when_a_node_fails_whose_peers_have_finished_for_good(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        for name in "ab":
            await nodes.open(name, (1, 2))
        await nodes.enter("a", "b")
        finishing = asyncio.create_task(nodes.nodes["b"].finish(1, None))
        closed = await nodes.nodes["a"].enter()
        if isinstance(closed, Place):
            # The round is not begun: b would have to take part in it.
            await nodes.until_restart(2, "a")
            closed = await nodes.nodes["a"].enter()
        assert isinstance(closed, Closed)
        assert "the workers on b have finished" in closed.reason
        await finishing

    scenario(work)


def test_job_of_other_settings_is_refused_under_the_same_name(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.open("a", (1, 1))
        await nodes.enter("a")
        other = await nodes.open("b", (1, 4))
        with pytest.raises(UsageError, match="already running something else on node a"):
            await other.enter()
        assert not await nodes.nodes["a"].reason_to_restart(1)

    scenario(work)


def test_workers_find_the_agents_socket_unless_their_number_is_unknown(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        protected = await nodes.open("a", (2, 2))
        assert VARIABLE in protected.environment
        unprotected = await nodes.open("b", (2, 2), workers=None)
        assert unprotected.environment == {}

    scenario(work)


def test_node_that_waits_in_vain_says_so_and_ends_nothing(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        alone = await nodes.open("a", (2, 2), join_timeout=0.2)
        found = await alone.enter()
        assert isinstance(found, TimedOut)
        assert "no round within 0 s: too few nodes have come; start more" in found.reason
        await nodes.nodes.pop("a").leave()
        for name in "bc":
            await nodes.open(name, (2, 2))
        await nodes.enter("b", "c")

    scenario(work)


def test_evicted_node_is_closed_and_the_others_go_on(scenario: Scenario) -> None:
    async def work(nodes: Nodes) -> None:
        for name in "ab":
            await nodes.open(name, (1, 2))
        await nodes.enter("a", "b")
        eviction = Eviction("slow disk", may_return=False)
        await nodes.store.commit((), (Put(KEYS.eviction("b"), eviction.encode()),))
        await nodes.until_restart(1, "a", "b")
        closed = asyncio.create_task(nodes.nodes["b"].enter())
        place: Any = await nodes.nodes["a"].enter()
        assert (place.generation, place.size) == (2, 1)
        evicted = await closed
        assert isinstance(evicted, Closed)
        assert "slow disk" in evicted.reason

    scenario(work)
