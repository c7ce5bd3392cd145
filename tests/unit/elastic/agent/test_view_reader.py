"""Claims about what a node reads of a job's keys."""

from __future__ import annotations

import asyncio

import pytest

from keepstep.elastic.agent.view_reader import ViewReader
from keepstep.elastic.rendezvous.view import Keys, View
from keepstep.elastic.store.contract import Listing, Put
from keepstep.elastic.store.memory import MemoryStore


def test_node_takes_no_key_for_its_own_whose_name_only_begins_like_it() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        keys = Keys("job")
        reader = ViewReader(store, keys, "node-1")
        await store.commit((), (Put(keys.node("node-10"), b"of another node"),))
        assert await reader.own_key() is None
        await store.commit((), (Put(keys.node("node-1"), b"own"),))
        own = await reader.own_key()
        assert own is not None
        assert own.value == b"own"

    asyncio.run(scenario())


@pytest.mark.parametrize("other", ["a", "c"])
def test_node_knows_whether_others_are_present(other: str) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        keys = Keys("job")
        reader = ViewReader(store, keys, "b")
        assert not await reader.has_others()
        await store.commit((), (Put(keys.node("b"), b"own"),))
        assert not await reader.has_others()
        await store.commit((), (Put(keys.node(other), b"of another node"),))
        assert await reader.has_others()

    asyncio.run(scenario())


def test_node_that_joins_reads_one_other_node_of_however_many() -> None:
    class Recording(MemoryStore):
        async def read(self, prefix: str, limit: int = 0) -> Listing:
            listing = await super().read(prefix, limit)
            nodes.append(sum(item.key.startswith(Keys("job").node()) for item in listing.items))
            return listing

    async def scenario() -> None:
        store, keys = Recording(), Keys("job")
        for number in range(9):
            await store.commit((), (Put(keys.node(f"node-{number}"), b"another"),))
        await ViewReader(store, keys, "own").before_joining(View())

    nodes: list[int] = []
    asyncio.run(scenario())
    assert sum(nodes) == 1
