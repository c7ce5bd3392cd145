"""Runs daemons in this process for a test, and waits for conditions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

from keepstep.monitor.daemon.daemon import Daemon
from keepstep.monitor.daemon.settings import DaemonComponents, Settings
from keepstep.monitor.secret import bearer_token
from tests.adaptive_timeouts import patient

SECRET = b"a secret of this test"


@asynccontextmanager
async def running(settings: Settings, parts: DaemonComponents) -> AsyncIterator[str]:
    daemon = Daemon(settings, parts)
    task = asyncio.create_task(daemon.run())
    try:
        await asyncio.wait([task, daemon.address], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield daemon.address.result()
    finally:
        daemon.stop()
        await task


async def get(url: str, path: str, token: str | None = None) -> aiohttp.ClientResponse:
    headers = {"Authorization": f"Bearer {bearer_token(SECRET) if token is None else token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url + path) as response,
    ):
        await response.read()
        return response


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until a condition holds, by polling: it depends on another process or a socket."""
    deadline_s = time.monotonic() + patient(timeout_s)
    while True:
        holds = condition()
        if await holds if isinstance(holds, Awaitable) else holds:
            return
        assert time.monotonic() < deadline_s, "the condition did not come to hold in time"
        await asyncio.sleep(0.02)
