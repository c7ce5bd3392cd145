"""Claims about connections to a daemon that ask nothing that they may: real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import web

from keepstep.monitor.daemon.connection_limits import ConnectionLimits
from keepstep.monitor.daemon.settings import DaemonComponents
from keepstep.transport.admission import MAX_PENDING
from tests.adaptive_timeouts import patient
from tests.integration.monitor.parts import Probe, settings
from tests.integration.monitor.running import get, running

HALF = b"GET /v1/overview HTTP/1.1\r\nHost: h\r\n"
WHOLE = HALF + b"\r\n"
UNFINISHED = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nno more"


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[int]:
    """Serve every request, and admit the connections of those that ask for `/v1`."""

    async def answer(request: web.Request) -> web.Response:
        if request.path.startswith("/v1/"):
            limits.admit(request)
        await request.read()
        return web.Response(text="answered")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    connections = runner.server
    assert connections is not None
    server = await asyncio.get_running_loop().create_server(
        lambda: limits.accept(connections()), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await runner.cleanup()


async def is_dropped(reader: asyncio.StreamReader) -> bool:
    try:
        return not await reader.read(1)
    except ConnectionResetError:
        return True


def test_a_request_that_does_not_end_is_dropped_and_an_authorized_one_keeps_its_connection() -> (
    None
):
    async def check() -> None:
        async with serving(ConnectionLimits(pending_s=0.2)) as port, asyncio.timeout(patient(20)):
            kept, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(WHOLE)
            assert (await kept.readuntil(b"answered")).startswith(b"HTTP/1.1 200")
            for request in (b"", HALF, UNFINISHED):
                reader, other = await asyncio.open_connection("127.0.0.1", port)
                other.write(request)
                assert await is_dropped(reader)
                other.close()
            writer.write(WHOLE)
            assert (await kept.readuntil(b"answered")).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(check())


def test_a_flood_of_connections_drops_its_own_and_the_daemon_answers() -> None:
    async def check() -> None:
        async with (
            running(settings(), DaemonComponents(probe=Probe())) as url,
            asyncio.timeout(patient(20)),
        ):
            place = urlsplit(url)
            flood = []
            for _ in range(MAX_PENDING + 8):
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
                writer.write(HALF)
                flood.append((reader, writer))
            for reader, _ in flood[:8]:
                assert await is_dropped(reader)
            assert (await get(url, "/v1/overview")).status == 200
            for _, writer in flood:
                writer.close()

    asyncio.run(check())
