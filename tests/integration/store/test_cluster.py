"""Claims about a coordinator of three members that loses one of them."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from keepstep.elastic.errors import StoreUnavailable
from keepstep.elastic.store.address import Address
from keepstep.elastic.store.contract import Change, Created, Put, Reset, Store
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.etcd_messages import rpc, stub
from tests.adaptive_timeouts import patient
from tests.integration.store.cluster import EtcdCluster

DEADLINE_S = 60.0


@pytest.fixture
def members() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.connect(address, deadline_s=patient(DEADLINE_S))
    try:
        yield store
    finally:
        await store.close()


def beginning_with(members: EtcdCluster, member: int) -> Address:
    """Return the cluster's address with a member first: a client connects to that member."""
    first = members.clients[member]
    return Address((first, *(client for client in members.clients if client != first)))


async def put_until_confirmed(store: Store, number: int) -> None:
    """Create a key; retry until a transaction is confirmed."""
    while True:
        try:
            await store.commit(
                (Created(f"/t/{number:03}", 0),), (Put(f"/t/{number:03}", b"%d" % number),)
            )
            return
        except StoreUnavailable:
            continue


@pytest.mark.parametrize("lost", range(3))
def test_watch_continues_without_gap_or_repetition_after_its_member_is_killed(
    members: EtcdCluster, lost: int
) -> None:
    async def scenario() -> None:
        async with (
            connected(beginning_with(members, lost)) as watcher,
            connected(beginning_with(members, (lost + 1) % 3)) as writer,
        ):
            seen: list[str] = []
            halfway = asyncio.Event()

            async def watch() -> None:
                async for batch in watcher.watch("/t/", 0):
                    assert not isinstance(batch, Reset)
                    seen.extend(change.key for change in batch)
                    if len(seen) >= 20:
                        halfway.set()
                    if len(seen) >= 60:
                        return

            async def write() -> None:
                for number in range(60):
                    if number == 30:
                        await halfway.wait()
                        await asyncio.to_thread(members.kill, lost)
                    await put_until_confirmed(writer, number)

            async with asyncio.timeout(patient(DEADLINE_S)), asyncio.TaskGroup() as tasks:
                tasks.create_task(watch())
                tasks.create_task(write())
            assert seen == [f"/t/{number:03}" for number in range(60)]

    asyncio.run(scenario())


def test_lease_outlives_the_member_that_granted_it(members: EtcdCluster) -> None:
    async def scenario() -> None:
        async with connected(beginning_with(members, 1)) as store:
            lease = await store.grant(30.0)
            await store.commit((), (Put("/t/a", b"value", lease),))
            assert await store.renew(lease) > 0
            await asyncio.to_thread(members.kill, 1)
            assert await store.renew(lease) > 0
            (item,) = (await store.read("/t/")).items
            assert item.value == b"value"

    asyncio.run(scenario())


def test_watch_is_reset_if_history_was_compacted_after_its_member_died(
    members: EtcdCluster,
) -> None:
    async def scenario() -> None:
        async with (
            connected(beginning_with(members, 2)) as watcher,
            connected(beginning_with(members, 0)) as writer,
        ):
            changes = watcher.watch("/t/", 0)
            await writer.commit((), (Put("/t/a", b"1"),))
            first = await anext(changes)
            assert not isinstance(first, Reset)
            # The watch is not read while its member dies and the others write and compact.
            await asyncio.to_thread(members.kill, 2)
            for number in range(2, 6):
                with contextlib.suppress(StoreUnavailable):
                    await writer.commit((), (Put("/t/a", b"%d" % number),))
            await put_until_confirmed(writer, 7)
            await compact(members.clients[0], (await writer.read("/t/")).revision)
            async with asyncio.timeout(patient(DEADLINE_S)):
                received = await anext(changes)
            while not isinstance(received, Reset):
                # Changes that the client received before the member died may come first.
                assert all(isinstance(change, Change) for change in received)
                received = await anext(changes)
            assert {item.key: item.value for item in received.listing.items}["/t/007"] == b"7"
            await writer.commit((), (Put("/t/a", b"after"),))
            following = await anext(changes)
            assert not isinstance(following, Reset)
            assert [change.value.value for change in following if change.value] == [b"after"]

    asyncio.run(scenario())


async def compact(endpoint: str, revision: int) -> None:
    """Compact etcd's history up to a revision, as its operators do from time to time."""
    import grpc.aio

    async with grpc.aio.insecure_channel(endpoint) as channel:
        await stub("etcdserverpb.KV", channel).Compact(
            rpc.CompactionRequest(revision=revision, physical=True),
            timeout=patient(10),
        )


def test_cluster_without_space_is_unavailable_and_can_be_read() -> None:
    """So that training goes on meanwhile, as in an outage."""

    async def scenario(members: EtcdCluster) -> None:
        async def fill(store: Store) -> None:
            # etcd looks at its size as of the last batch of writes that it has put to the disk.
            async with asyncio.timeout(patient(DEADLINE_S)):
                for number in itertools.count():
                    await store.commit((), (Put(f"/t/{number}", bytes(2**20)),))

        async with connected(Address((members.clients[0],))) as store:
            with pytest.raises(StoreUnavailable, match=r"takes no writes.*alarm disarm"):
                await fill(store)
            assert (await store.read("/t/0")).items

    with EtcdCluster(1, options=("--quota-backend-bytes", str(16 * 2**20))) as members:
        asyncio.run(scenario(members))
