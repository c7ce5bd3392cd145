"""Claims about calls of etcd that fail, by endpoints that answer as gRPC does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from keepstep.elastic.store.address import Access, Address
from keepstep.elastic.store.credentials import Credentials
from keepstep.elastic.store.etcd import EtcdStore
from tests.patience import patient

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

    def Watch(self, **_: object) -> FailingCall:
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield await self.read()

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
