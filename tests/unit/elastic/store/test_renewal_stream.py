"""Claims about the stream on which leases are renewed: how long it is used, and when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from keepstep.elastic.errors import StoreUnavailable
from keepstep.elastic.store import etcd
from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.etcd_messages import rpc

ENDPOINTS = ("127.0.0.1:1", "127.0.0.1:2")


class Member:
    """The lease service of a member, which answers each renewal on a stream of its own or not.

    Args:
        answers: whether it answers.
    """

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.streams: list[Stream] = []
        self.is_asked = asyncio.Event()

    def LeaseKeepAlive(self, **_: object) -> Stream:
        self.streams.append(Stream(self))
        self.is_asked.set()
        return self.streams[-1]


class Stream:
    """A stream of renewals, which answers one after the other. As in gRPC, one task may read."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._asked: list[int] = []
        self._is_read = False
        self.has_ended = False
        self.is_cancelled = False

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError
        self._asked.append(request.ID)

    async def read(self) -> Any:
        assert not self._is_read
        self._is_read = True
        await asyncio.sleep(0)
        self._is_read = False
        if not self._member.answers:
            await asyncio.Event().wait()
        return rpc.LeaseKeepAliveResponse(ID=self._asked[0], TTL=self._asked.pop(0))

    def done(self) -> bool:
        return self.has_ended or self.is_cancelled

    def cancel(self) -> None:
        self.is_cancelled = True


def run(scenario: Callable[[EtcdStore], Any], *members: Member, deadline_s: float = 600.0) -> None:
    async def connected() -> None:
        store = EtcdStore(
            Address(ENDPOINTS[: len(members)], Access.PLAIN), deadline_s, Credentials()
        )
        store._endpoints = [
            replace(endpoint, lease=member)
            for endpoint, member in zip(store._endpoints, members, strict=True)
        ]
        await scenario(store)
        await store.close()
        assert all(stream.done() for member in members for stream in member.streams)

    asyncio.run(connected())


def test_renewals_use_one_stream_until_it_ends() -> None:
    member = Member()

    async def scenario(store: EtcdStore) -> None:
        assert [await store.renew(5), await store.renew(6)] == [5.0, 6.0]
        assert len(member.streams) == 1
        # As when the member restarts between two renewals.
        member.streams[0].has_ended = True
        assert await store.renew(7) == 7.0
        assert len(member.streams) == 2

    run(scenario, member)


def test_a_member_that_does_not_answer_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "_ATTEMPT_S", 0.01)
    first, second = Member(answers=False), Member()

    async def scenario(store: EtcdStore) -> None:
        assert await store.renew(5) == 5.0
        assert [len(first.streams), len(second.streams)] == [1, 1]
        assert first.streams[0].is_cancelled
        # Calls of other kinds may have gone back to it.
        first.answers = True
        store._switch_endpoint(store._endpoints[1])
        assert await store.renew(6) == 6.0
        assert len(first.streams) == 2
        assert second.streams[0].is_cancelled

    run(scenario, first, second)


def test_an_answer_that_came_too_late_is_not_taken_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd, "_ATTEMPT_S", 0.01)
    member = Member(answers=False)

    async def scenario(store: EtcdStore) -> None:
        with pytest.raises(StoreUnavailable, match="no answer for 0 s"):
            await store.renew(5)
        member.answers = True
        assert await store.renew(6) == 6.0

    run(scenario, member, deadline_s=0.01)


def test_renewals_at_one_time_each_get_their_own_answer() -> None:
    member = Member()

    async def scenario(store: EtcdStore) -> None:
        answers = await asyncio.gather(*(store.renew(lease) for lease in range(1, 6)))
        assert answers == [1.0, 2.0, 3.0, 4.0, 5.0]

    run(scenario, member)


def test_a_cancelled_renewal_ends_its_stream() -> None:
    member = Member(answers=False)

    async def scenario(store: EtcdStore) -> None:
        renewing = asyncio.ensure_future(store.renew(5))
        await member.is_asked.wait()
        renewing.cancel()
        await asyncio.wait([renewing])
        assert renewing.cancelled()
        member.answers = True
        assert await store.renew(6) == 6.0
        assert len(member.streams) == 2

    run(scenario, member)
