"""Claims about calls of etcd that fail, by endpoints that answer as gRPC does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest

from keepstep.elastic.errors import UsageError
from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.etcd_messages import kv, rpc
from tests.adaptive_timeouts import patient

ADDRESS = Address(("127.0.0.1:1",), Access.PLAIN)


class FailingCall:
    """A streaming call, and its stub; the first attempt fails when its caller is cancelled.

    gRPC's `StreamStreamCall._prepare_rpc` takes a cancellation for itself if the call has failed
    just before.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self.attempted = asyncio.Event()

    def LeaseKeepAlive(self, *_: object, **__: object) -> FailingCall:
        return self

    def Watch(self, *_: object, **__: object) -> FailingCall:
        return self

    async def write(self, _: object) -> None:
        return

    async def read(self) -> Any:
        self.attempts += 1
        self.attempted.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.attempts > 1:
                raise
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing) from None

    def cancel(self) -> None:
        return


async def renew(store: EtcdStore) -> None:
    await store.renew(1)


async def watch(store: EtcdStore) -> None:
    async for _ in store.watch("/t/", 0):
        pass


@pytest.mark.parametrize("use", [renew, watch])
def test_task_that_is_cancelled_while_its_call_fails_ends_and_does_not_try_again(
    use: Callable[[EtcdStore], Awaitable[None]],
) -> None:
    """An agent that left while etcd was away waited for ever for its own renewals to end."""

    async def scenario() -> None:
        store, call = EtcdStore(ADDRESS, 600.0, Credentials()), FailingCall()
        store._endpoints = [
            replace(endpoint, lease=call, watch=call) for endpoint in store._endpoints
        ]
        task = asyncio.ensure_future(use(store))
        async with asyncio.timeout(patient(30)):
            await call.attempted.wait()
            call.attempted.clear()
            task.cancel()
            again = asyncio.create_task(call.attempted.wait())
            await asyncio.wait({task, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        task.cancel()
        await asyncio.wait({task})
        assert call.attempts == 1
        assert task.cancelled()
        await store.close()

    asyncio.run(scenario())


class CancellingMember:
    """The stubs of a member that cancels watches and refuses calls, and notes their tokens.

    Args:
        reason: why it cancels them.
        until_token: the token with which it does not; None: it always does.
    """

    def __init__(self, reason: str, until_token: str | None = None) -> None:
        self._reason = reason
        self._until_token = until_token
        self.watches: list[str | None] = []
        self.ranges: list[str | None] = []
        self.authentications = 0

    def Watch(self, _: object, *, metadata: Sequence[tuple[str, str]]) -> CancellingMember:
        self.watches.append(dict(metadata).get("token"))
        assert len(self.watches) < 100, "it is asked again and again"
        return self

    async def read(self) -> Any:
        if self.watches[-1] == self._until_token is not None:
            event = kv.Event(kv=kv.KeyValue(key=b"/t/a", mod_revision=5))
            return rpc.WatchResponse(events=[event])
        return rpc.WatchResponse(created=True, canceled=True, cancel_reason=self._reason)

    def cancel(self) -> None:
        return

    async def Range(self, _: object, *, metadata: Sequence[tuple[str, str]], **__: object) -> Any:
        self.ranges.append(dict(metadata).get("token"))
        if self.ranges[-1] == self._until_token:
            return rpc.RangeResponse()
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAUTHENTICATED, nothing, nothing, details=self._reason
        )

    async def Authenticate(self, *_: object, **__: object) -> Any:
        self.authentications += 1
        return rpc.AuthenticateResponse(token=f"token {self.authentications}")


def recorded_pauses(monkeypatch: pytest.MonkeyPatch, most: int) -> list[float]:
    """Return the pauses that are made, which take no time; the one after `most` does not end."""
    pauses: list[float] = []

    async def sleep(pause_s: float, _: None = None) -> None:
        pauses.append(pause_s)
        if len(pauses) > most:
            await asyncio.Event().wait()

    monkeypatch.setattr("keepstep.elastic.store.etcd.asyncio.sleep", sleep)
    return pauses


def store_of(member: CancellingMember, user: str | None = "agent") -> EtcdStore:
    store = EtcdStore(ADDRESS, 600.0, Credentials(user=user, password=user))
    store._endpoints = [
        replace(endpoint, watch=member, auth=member, kv=member) for endpoint in store._endpoints
    ]
    return store


REJECTED = "rpc error: code = Unauthenticated desc = etcdserver: "


@pytest.mark.parametrize("reason", ["invalid auth token", "revision of auth store is old"])
def test_watch_that_is_cancelled_for_an_old_token_gets_a_new_one(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """etcd from 3.5.5 on says so; the same token was used again and again, without a pause."""

    async def scenario() -> None:
        # The second token is new, but not known to this member yet.
        member = CancellingMember(REJECTED + reason, until_token="token 2")
        pauses = recorded_pauses(monkeypatch, most=5)
        store = store_of(member)
        async with asyncio.timeout(patient(10)), aclosing(store.watch("/t/", 0)) as changes:
            (change,) = await anext(changes)
        assert change.revision == 5
        assert member.watches == [None, "token 1", "token 2"]
        assert len(pauses) == 2
        await store.close()

    asyncio.run(scenario())


def test_watch_that_is_not_permitted_is_refused_also_with_a_new_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        member = CancellingMember("etcdserver: permission denied")
        recorded_pauses(monkeypatch, most=5)
        store = store_of(member)
        with pytest.raises(UsageError, match="refuses a watch on /t/"):
            await watch(store)
        assert member.watches == [None, "token 1"]
        await store.close()

    asyncio.run(scenario())


def test_watch_that_a_member_cancels_each_time_is_asked_for_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        member = CancellingMember("etcdserver: something new")
        pauses = recorded_pauses(monkeypatch, most=8)
        store = store_of(member)
        task = asyncio.ensure_future(watch(store))
        async with asyncio.timeout(patient(10)):
            while len(pauses) <= 8:
                await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        task.cancel()
        await asyncio.wait({task})
        assert len(member.watches) == len(pauses)
        assert pauses[-1] > 4 * pauses[0]
        await store.close()

    asyncio.run(scenario())


def test_call_whose_new_tokens_are_rejected_pauses_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        member = CancellingMember(REJECTED + "invalid auth token", until_token="token 3")
        pauses = recorded_pauses(monkeypatch, most=5)
        store = store_of(member)
        async with asyncio.timeout(patient(10)):
            await store.read("/t/")
        assert member.ranges == [None, "token 1", "token 2", "token 3"]
        # An expired token costs no pause.
        assert len(pauses) == 2
        await store.close()

    asyncio.run(scenario())
