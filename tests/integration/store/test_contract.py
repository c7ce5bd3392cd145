"""The contract test suite of stores, run on etcd and in memory."""

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from keepstep.elastic.errors import LeaseLost, StoreUnavailable, UsageError
from keepstep.elastic.store.address import parse_address
from keepstep.elastic.store.contract import Change, Created, Delete, Modified, Put, Reset, Store
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.embedded import EmbeddedEtcd
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.memory import MemoryStore
from tests.adaptive_timeouts import patient
from tests.integration.store.cluster import EtcdCluster

SECRET = b"the secret of this test"
Scenario = Callable[[Store], Awaitable[None]]


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Store]:
    if kind == "memory":
        yield MemoryStore()
        return
    with EmbeddedEtcd(SECRET) as server:
        store = await EtcdStore.connect(
            parse_address(server.url), credentials=Credentials.from_secret(SECRET)
        )
        try:
            yield store
        finally:
            await store.close()


@pytest.fixture(params=["memory", "etcd"])
def play(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    async def run(scenario: Scenario) -> None:
        async with opened(request.param) as store, asyncio.timeout(patient(30)):
            await scenario(store)

    return lambda scenario: asyncio.run(run(scenario))


def test_read_returns_keys_in_order(play: Callable[[Scenario], None]) -> None:
    async def scenario(store: Store) -> None:
        await store.commit((), (Put("/t/b", b"2"), Put("/t/a", b"1"), Put("/u", b"3")))
        assert [(item.key, item.value) for item in (await store.read("/t/")).items] == [
            ("/t/a", b"1"),
            ("/t/b", b"2"),
        ]

    play(scenario)


def test_limited_read_begins_with_the_key_itself(play: Callable[[Scenario], None]) -> None:
    async def scenario(store: Store) -> None:
        puts = [Put(f"/t/{name}", b"1") for name in ("n10", "n1", "n11", "m")]
        await store.commit((), puts)
        for limit, keys in ((1, ["/t/n1"]), (2, ["/t/n1", "/t/n10"]), (9, 3), (0, 3)):
            found = [item.key for item in (await store.read("/t/n1", limit=limit)).items]
            assert found == keys or len(found) == keys

    play(scenario)


def test_transaction_with_a_false_condition_changes_nothing(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(store: Store) -> None:
        first = await store.commit((Created("/t/a", 0),), (Put("/t/a", b"1"),))
        assert first.succeeded
        repeated = await store.commit((Created("/t/a", 0),), (Put("/t/a", b"2"), Put("/t/b", b"2")))
        assert not repeated.succeeded
        stale = await store.commit((Modified("/t/a", first.revision - 1),), (Delete("/t/a"),))
        assert not stale.succeeded
        current = await store.commit((Modified("/t/a", first.revision),), (Put("/t/a", b"3"),))
        assert current.succeeded
        (item,) = (await store.read("/t/")).items
        assert (item.value, item.created, item.modified) == (b"3", first.revision, current.revision)

    play(scenario)


def test_end_of_a_lease_deletes_its_keys_and_a_revoked_lease_cannot_be_renewed(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(store: Store) -> None:
        lease = await store.grant(30.0)
        assert await store.renew(lease) == 30.0
        await store.commit((), (Put("/t/a", b"1", lease), Put("/t/b", b"1")))
        await store.revoke(lease)
        await store.revoke(lease)
        assert [item.key for item in (await store.read("/t/")).items] == ["/t/b"]
        with pytest.raises(LeaseLost):
            await store.renew(lease)

    play(scenario)


def test_watch_delivers_every_revision_completely_once_and_in_order(
    play: Callable[[Scenario], None],
) -> None:
    async def scenario(store: Store) -> None:
        await store.commit((), (Put("/t/before", b""),))
        after = (await store.read("/t/")).revision
        for number in range(20):
            await store.commit(
                (), (Put("/t/a", b"%d" % number), Put("/t/b", b""), Put("/other", b""))
            )
        await store.commit((), (Delete("/t/", prefix=True),))
        seen: list[tuple[Change, ...]] = []
        changes = store.watch("/t/", after)
        while len(seen) < 21:
            batch = await anext(aiter(changes))
            assert not isinstance(batch, Reset)
            seen.append(batch)
        values = [
            change.value.value
            for batch in seen
            for change in batch
            if change.key == "/t/a" and change.value
        ]
        assert values == [b"%d" % number for number in range(20)]
        assert all({change.key for change in batch} == {"/t/a", "/t/b"} for batch in seen[:20])
        assert {change.key for change in seen[20]} == {"/t/a", "/t/b", "/t/before"}
        assert all(change.value is None for change in seen[20])

    play(scenario)


def test_watch_from_before_a_compaction_begins_with_a_reset() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        await store.commit((), (Put("/t/a", b"1"),))
        await store.commit((), (Put("/t/a", b"2"),))
        await store.compact()
        first = await anext(store.watch("/t/", 1))
        assert isinstance(first, Reset)
        assert [item.value for item in first.listing.items] == [b"2"]

    asyncio.run(scenario())


def test_memory_lease_ends_when_time_passes_without_renewal() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        lease = await store.grant(5.0)
        await store.commit((), (Put("/t/a", b"1", lease),))
        await store.advance(4.0)
        await store.renew(lease)
        await store.advance(8.0)
        assert (await store.read("/t/")).items
        await store.advance(9.0)
        assert not (await store.read("/t/")).items

    asyncio.run(scenario())


def test_calls_and_watches_fail_over_to_an_endpoint_that_answers(
    etcd_server: EmbeddedEtcd,
) -> None:
    async def scenario() -> None:
        dead = "127.0.0.1:9"
        address = parse_address(f"keepstep://{dead},{parse_address(etcd_server.url).endpoints[0]}")
        store = await EtcdStore.connect(address)
        revision = (await store.read("/t/")).revision
        await store.commit((), (Put("/t/a", b"1"),))
        batch = await anext(aiter(store.watch("/t/", revision)))
        assert not isinstance(batch, Reset)
        assert batch[0].key == "/t/a"
        await store.close()

    asyncio.run(scenario())


class HangingMember(grpc.GenericRpcHandler):  # type: ignore[misc] - grpc has no types
    """A member whose disk hangs: it answers reads, keeps watches open, and confirms no write."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint)

    def service(self, details: Any) -> Any:
        if details.method != "/etcdserverpb.KV/Range":
            return grpc.stream_stream_rpc_method_handler(self._answer_nothing)
        read = self._channel.unary_unary(details.method)

        async def pass_on(request: bytes, _: object) -> Any:
            return await read(request)

        return grpc.unary_unary_rpc_method_handler(pass_on)

    async def _answer_nothing(self, _: object, __: object) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def close(self) -> None:
        await self._channel.close()


@asynccontextmanager
async def hanging_member(endpoint: str) -> AsyncIterator[str]:
    server, member = grpc.aio.server(), HangingMember(endpoint)
    server.add_generic_rpc_handlers((member,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await member.close()


def test_calls_and_watches_leave_a_member_whose_disk_hangs() -> None:
    """Leases are renewed through it, and nothing is shown: a leader there decided nothing more."""

    async def scenario(cluster: EtcdCluster) -> None:
        (sound,) = cluster.clients
        async with hanging_member(sound) as hanging:
            store = await EtcdStore.connect(parse_address(f"etcd://{hanging},{sound}"))
            watch = store.watch("/t/", (await store.read("/t/")).revision)
            watching = asyncio.ensure_future(anext(watch))
            with pytest.raises(StoreUnavailable, match="did not confirm") as unconfirmed:
                await store.commit((), (Put("/t/a", b"1"),))
            assert unconfirmed.value.unknown
            await store.commit((), (Put("/t/a", b"2"),))
            async with asyncio.timeout(patient(30)):
                batch = await watching
            assert not isinstance(batch, Reset)
            assert [change.value.value for change in batch if change.value] == [b"2"]
            await watch.aclose()
            await store.close()

    with EtcdCluster(1) as cluster:
        asyncio.run(scenario(cluster))


def test_renewals_leave_a_member_that_never_answers() -> None:
    async def scenario(cluster: EtcdCluster, mute: socket.socket) -> None:
        (sound,) = cluster.clients
        other = await EtcdStore.connect(parse_address(f"etcd://{sound}"))
        lease = await other.grant(60)
        address = parse_address(f"etcd://127.0.0.1:{mute.getsockname()[1]},{sound}")
        store = EtcdStore(address, 10.0, Credentials())
        async with asyncio.timeout(patient(30)):
            assert await store.renew(lease) > 0
            assert await store.renew(lease) > 0
        await store.close()
        await other.close()

    with EtcdCluster(1) as cluster, socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(scenario(cluster, mute))


def test_watch_on_a_member_that_never_answered_goes_along_to_one_that_does() -> None:
    """gRPC never ends a write of a call that is cancelled before: a leader saw nothing more."""

    async def scenario(cluster: EtcdCluster, mute: socket.socket) -> None:
        address = parse_address(f"etcd://127.0.0.1:{mute.getsockname()[1]},{cluster.clients[0]}")
        store = EtcdStore(address, 10.0, Credentials())
        watch = store.watch("/t/", 0)
        watching = asyncio.ensure_future(anext(watch))
        await store.read("/t/")
        await store.commit((), (Put("/t/a", b"1"),))
        async with asyncio.timeout(patient(30)):
            assert await watching
        await watch.aclose()
        await store.close()

    with EtcdCluster(1) as cluster, socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(scenario(cluster, mute))


def test_watch_that_its_member_ends_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC leaves the requests of such a call waiting, and asyncio logged errors of that."""

    async def scenario(cluster: EtcdCluster) -> None:
        store = await EtcdStore.connect(parse_address(cluster.url))
        before = asyncio.all_tasks()
        watch = store.watch("/t/", 0)
        await store.commit((), (Put("/t/a", b"1"),))
        await anext(watch)
        (call,) = store._watches
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        watching = asyncio.ensure_future(anext(watch))
        cluster.kill(0)
        async with asyncio.timeout(patient(60)):
            await ended.wait()
            watching.cancel()
            while left := asyncio.all_tasks() - before:
                await asyncio.wait(left)
        await store.close()
        gc.collect()

    with EtcdCluster(1) as cluster:
        asyncio.run(scenario(cluster))
    assert "destroyed" not in caplog.text
    assert "never retrieved" not in caplog.text


def test_renewal_that_is_cancelled_leaves_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A task of gRPC's that sends requests waits for ever if its call has not begun by then."""

    async def scenario(cluster: EtcdCluster) -> None:
        store = await EtcdStore.connect(parse_address(cluster.url))
        lease = await store.grant(60)
        for turns in range(200):
            renewing = asyncio.ensure_future(store.renew(lease))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            renewing.cancel()
            await asyncio.wait([renewing])
        assert await store.renew(lease) > 0
        gc.collect()
        await store.close()

    with EtcdCluster(1) as cluster:
        asyncio.run(scenario(cluster))
    assert "destroyed" not in caplog.text


def test_error_for_an_unreachable_coordinator_names_it_and_a_remedy() -> None:
    async def scenario() -> None:
        with pytest.raises(StoreUnavailable, match=r"127.0.0.1:9.*--store"):
            await EtcdStore.connect(parse_address("etcd://127.0.0.1:9"), deadline_s=0.5)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text",
    ["redis://h:1", "http://h:1", "https://h:1", "etcd://h:x", "etcd://h:99999", "etcd://:1"],
)
def test_malformed_address_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_etcd_dies_with_the_process_that_started_it() -> None:
    code = (
        "from keepstep.elastic.store.embedded import EmbeddedEtcd\n"
        "server = EmbeddedEtcd(b'x' * 32); server.start(); print(server.pid, flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    with owner.stdout, owner.stdin:
        etcd = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
        owner.wait()
        gone, alive = psutil.wait_procs([etcd], timeout=patient(10))
    assert gone
    assert not alive


def test_importing_the_training_api_loads_neither_etcd_nor_protobuf() -> None:
    code = (
        "import sys, keepstep; keepstep.join; import keepstep.elastic.store\n"
        "unwanted = ('etcd3', 'grpc', 'google.protobuf')\n"
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
