"""Claims about the etcd that three nodes form, each with one member, on real processes."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from keepstep.elastic.errors import StoreUnavailable
from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.contract import Put
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.etcd import EtcdStore, open_endpoint
from keepstep.elastic.store.member_process import CoordinatorMember, _listed
from keepstep.elastic.store.members import Member, parse_members
from keepstep.elastic.store.ports import ReservedPort
from tests.adaptive_timeouts import patient

SECRET = b"known to all nodes of the job"


class Nodes:
    """Three nodes on this machine. Each has the first of the names that is free."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.address = Address(tuple(it.endpoint for it in members), Access.SECRET)
        self.running: list[CoordinatorMember] = []

    def start(self) -> CoordinatorMember:
        started = CoordinatorMember.started(self.members, SECRET)
        assert started is not None
        self.running.append(started)
        return started

    async def kill(self, member: CoordinatorMember, *, loses_data: bool) -> None:
        """Leave what an agent leaves that is killed, with its etcd or with the whole machine."""
        self.running.remove(member)
        member._running.cancel()
        member._end_process()
        member._place.clients.close()
        member._place.peers.close()
        os.close(member._place.lock)
        if loses_data:
            shutil.rmtree(member._directory)

    async def connect(self) -> EtcdStore:
        credentials = Credentials.from_secret(SECRET)
        return await EtcdStore.connect(
            self.address, deadline_s=patient(60), credentials=credentials
        )

    async def wait_until_all_serve(self) -> None:
        async def is_serving() -> bool:
            return all([await it._serves(it.member) for it in self.running])

        await until(is_serving)


@asynccontextmanager
async def three_nodes() -> AsyncIterator[Nodes]:
    with reserved_pairs(3) as ports:
        nodes = Nodes(parse_members([f"127.0.0.1:{port}" for port in ports]))
        try:
            for _ in range(3):
                nodes.start()
            yield nodes
        finally:
            for member in nodes.running:
                await member.close()


@contextmanager
def reserved_pairs(count: int) -> Iterator[list[int]]:
    """Keep ports, and the next ones as well, from other processes; members may have them."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            with ExitStack() as pair:
                port = pair.enter_context(ReservedPort()).number
                try:
                    pair.enter_context(ReservedPort(port=port + 1))
                except OSError:
                    continue  # Another process listens there.
                if all(abs(port - other) > 1 for other in found):
                    found.append(port)
                    stack.enter_context(pair.pop_all())
        yield found


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "keepstep"


def run(scenario: Callable[[Nodes], Awaitable[None]]) -> None:
    async def in_context() -> None:
        async with three_nodes() as nodes:
            await scenario(nodes)

    asyncio.run(in_context())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(patient(60)):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


async def write(store: EtcdStore, key: str) -> None:
    while True:
        try:
            await store.commit((), (Put(key, b"1"),))
        except StoreUnavailable as error:
            if not error.unknown:
                raise
        else:
            return


async def keys(store: EtcdStore) -> list[str]:
    return [item.key for item in (await store.read("/t/")).items]


async def numbers(nodes: Nodes) -> set[int]:
    """Return the numbers of the etcd's members."""
    credentials = Credentials.from_secret(SECRET)
    endpoint = open_endpoint(nodes.running[0].member.endpoint, Access.SECRET, credentials)
    try:
        return {it.id for it in await _listed(endpoint)}
    finally:
        await endpoint.channel.close()


def test_member_that_is_killed_comes_back_with_its_data_and_is_replaced_without(
    runtime: Path,
) -> None:
    async def scenario(nodes: Nodes) -> None:
        store = await nodes.connect()
        await write(store, "/t/a")
        await nodes.wait_until_all_serve()
        first = await numbers(nodes)
        for count, loses_data in enumerate((False, True)):
            await nodes.kill(nodes.running[0], loses_data=loses_data)
            await write(store, f"/t/b{count}")
            nodes.start()
            await nodes.wait_until_all_serve()
        assert await keys(store) == ["/t/a", "/t/b0", "/t/b1"]
        # The one without data has a new number; nobody counts on the old one.
        last = await numbers(nodes)
        assert (len(first), len(last), len(first & last)) == (3, 3, 2)
        await store.close()

    run(scenario)
    assert [path.name for path in runtime.iterdir()] == []
    assert not [it for it in psutil.Process().children() if "etcd" in it.name()]


def test_majority_without_data_forms_another_etcd_which_the_last_member_joins() -> None:
    async def scenario(nodes: Nodes) -> None:
        store = await nodes.connect()
        await write(store, "/t/a")
        for _ in range(2):
            await nodes.kill(nodes.running[0], loses_data=True)
        for _ in range(2):
            nodes.start()

        async def is_empty() -> bool:
            return await keys(store) == []

        await until(is_empty)
        await nodes.wait_until_all_serve()
        assert len({member._token for member in nodes.running}) == 1
        assert len(await numbers(nodes)) == 3
        await store.close()

    run(scenario)


def test_data_of_an_earlier_etcd_does_not_get_into_a_new_one() -> None:
    async def scenario(nodes: Nodes) -> None:
        store = await nodes.connect()
        await write(store, "/t/old")
        await nodes.wait_until_all_serve()
        for count in range(3):
            await nodes.kill(nodes.running[0], loses_data=count < 2)
        for _ in range(2):
            nodes.start()
        await write(store, "/t/new")
        nodes.start()
        await nodes.wait_until_all_serve()
        assert await keys(store) == ["/t/new"]
        await store.close()

    run(scenario)
