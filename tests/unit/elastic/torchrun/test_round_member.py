"""Claims about torchrun agents' rounds: members, losses, ends, over a coordinator in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.records import Eviction
from keepstep.elastic.rendezvous.view import Keys, from_listing
from keepstep.elastic.store.contract import Put
from keepstep.elastic.store.memory import MemoryStore
from keepstep.elastic.torchrun.round_member import Place, RoundMember
from keepstep.elastic.torchrun.rounds import Closed, TimedOut, result_of
from keepstep.elastic.torchrun.settings import Settings, parse_settings
from tests.adaptive_timeouts import patient

KEYS = Keys("job")


def settings(nodes: tuple[int, int], **config: object) -> Settings:
    limits = {"last_call_timeout": 0.01, "lease_ttl_s": 0.4, "join_timeout": patient(30)}
    return parse_settings("h:1", "job", nodes, None, limits | config, {})


class Nodes:
    """The nodes of one job, in one process."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.members: dict[str, RoundMember] = {}

    async def open(self, node: str, nodes: tuple[int, int], **config: object) -> RoundMember:
        member = await RoundMember.open(settings(nodes, **config), self.store, node, "127.0.0.1")
        self.members[node] = member
        return member

    async def enter(self, *nodes: str) -> dict[str, Place]:
        """Let nodes take part in the next round, and begin their work."""
        async with asyncio.timeout(patient(20)):
            entered = await asyncio.gather(*(self.members[node].enter() for node in nodes))
            places = {}
            for node, place in zip(nodes, entered, strict=True):
                assert isinstance(place, Place), place
                if place.listening is not None:
                    place.listening.close()
                await self.members[node].begin_work()
                places[node] = place
        assert sorted(place.rank for place in places.values()) == list(range(len(nodes)))
        assert {place.size for place in places.values()} == {len(nodes)}
        return places

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(patient(20)):
            while not is_reached():  # noqa: ASYNC110 - conditions of any kind
                await asyncio.sleep(0.005)

    async def until_restart(self, generation: int, *nodes: str) -> None:
        """Wait until torchrun would stop the workers of these nodes."""
        members = [self.members[node] for node in nodes]
        await self.until(lambda: all(it.nodes_waiting(generation) for it in members))

    async def end_lease(self, node: str) -> None:
        view = from_listing(KEYS, await self.store.read(KEYS.prefix))
        await self.store.revoke(view.nodes[node].record.lease)


def scenario(work: Callable[[Nodes], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def nodes() -> AsyncIterator[Nodes]:
        them = Nodes()
        try:
            yield them
        finally:
            for member in them.members.values():
                await member.leave()

    async def run() -> None:
        async with nodes() as them:
            await work(them)

    asyncio.run(run())


def test_lost_node_is_left_out_and_comes_back_with_a_store_of_its_own_for_each_round() -> None:
    async def work(nodes: Nodes) -> None:
        for node in "abc":
            await nodes.open(node, (2, 3))
        first = await nodes.enter("a", "b", "c")
        await nodes.end_lease("c")
        await nodes.until_restart(1, "a", "b")
        second = await nodes.enter("a", "b")
        # It learns that its lease has ended, joins again, and the others let it in.
        await nodes.until_restart(1, "c")
        returning = asyncio.create_task(nodes.members["c"].enter())
        await nodes.until_restart(2, "a", "b")
        staying = await asyncio.gather(*(nodes.members[node].enter() for node in "ab"))
        third = [*staying, await returning]
        assert all(isinstance(place, Place) and place.size == 3 for place in third)
        rounds = [first["a"], second["a"], third[0]]
        assert len({place.store_port for place in rounds if isinstance(place, Place)}) == 3
        assert nodes.members["a"].nodes_waiting(3) == 0

    scenario(work)


def test_failed_workers_of_one_node_begin_a_round_with_all() -> None:
    async def work(nodes: Nodes) -> None:
        for node in "ab":
            await nodes.open(node, (2, 2))
        await nodes.enter("a", "b")
        again = asyncio.create_task(nodes.members["b"].enter())
        await nodes.until_restart(1, "a")
        assert nodes.members["a"].reason_to_restart() == "workers on b have failed"
        place = await nodes.members["a"].enter()
        assert isinstance(place, Place)
        assert (place.generation, place.size) == (2, 2)
        assert isinstance(await again, Place)

    scenario(work)


def test_job_whose_nodes_all_died_goes_on_with_those_that_are_started_again() -> None:
    async def work(nodes: Nodes) -> None:
        for node in "ab":
            await nodes.open(node, (2, 2))
        await nodes.enter("a", "b")
        dead = [nodes.members[node] for node in "ab"]
        for node in "ab":
            await nodes.end_lease(node)
            await nodes.open(node, (2, 2))
        places = await nodes.enter("a", "b")
        assert {place.generation for place in places.values()} == {2}
        for member in dead:
            assert member.nodes_waiting(1)
            await member.leave()

    scenario(work)


def test_node_beyond_the_maximum_stands_by_and_takes_a_lost_ones_place() -> None:
    async def work(nodes: Nodes) -> None:
        for node in "ab":
            await nodes.open(node, (2, 2))
        await nodes.enter("a", "b")
        await nodes.open("c", (2, 2))
        standing_by = asyncio.create_task(nodes.members["c"].enter())
        await nodes.until(lambda: nodes.members["c"].view.generation_number == 1)
        assert nodes.members["a"].nodes_waiting(1) == 0
        await nodes.members.pop("b").leave()
        await nodes.until_restart(1, "a")
        place = await nodes.members["a"].enter()
        taken = await standing_by
        assert isinstance(place, Place)
        assert isinstance(taken, Place)
        assert (place.size, place.rank, taken.rank) == (2, 0, 1)

    scenario(work)


@pytest.mark.parametrize("error", [None, RuntimeError()])
def test_end_of_one_node_closes_the_job_for_all(error: Exception | None) -> None:
    async def work(nodes: Nodes) -> None:
        for node in "ab":
            await nodes.open(node, (1, 2))
        await nodes.enter("a", "b")
        await nodes.members["b"].end_job(result_of("b", error))
        await nodes.members.pop("b").leave()
        member = nodes.members["a"]
        await nodes.until(lambda: member.view.result is not None)
        # The others work to their end after a success, and stop after a failure.
        assert member.nodes_waiting(1) == (0 if error is None else 1)
        closed = await member.enter()
        assert isinstance(closed, Closed)
        assert "b" in closed.reason
        await nodes.members.pop("a").leave()
        assert (await nodes.store.read(KEYS.prefix)).items == ()

    scenario(work)


def test_job_of_other_settings_is_refused_under_the_same_name() -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.open("a", (1, 1))
        await nodes.enter("a")
        other = await nodes.open("b", (1, 4))
        with pytest.raises(UsageError, match="already running something else on node a"):
            await other.enter()
        assert nodes.members["a"].nodes_waiting(1) == 0

    scenario(work)


def test_node_that_waits_in_vain_says_so_and_ends_nothing() -> None:
    async def work(nodes: Nodes) -> None:
        alone = await nodes.open("a", (2, 2), join_timeout=0.2)
        assert isinstance(await alone.enter(), TimedOut)
        await nodes.members.pop("a").leave()
        for node in "bc":
            await nodes.open(node, (2, 2))
        await nodes.enter("b", "c")

    scenario(work)


def test_evicted_node_is_closed_and_the_others_go_on() -> None:
    async def work(nodes: Nodes) -> None:
        for node in "ab":
            await nodes.open(node, (1, 2))
        await nodes.enter("a", "b")
        eviction = Eviction("slow disk", may_return=False)
        await nodes.store.commit((), (Put(KEYS.eviction("b"), eviction.encode()),))
        await nodes.until_restart(1, "a", "b")
        closed = asyncio.create_task(nodes.members["b"].enter())
        place: Any = await nodes.members["a"].enter()
        assert (place.generation, place.size) == (2, 1)
        assert isinstance(await closed, Closed)

    scenario(work)
