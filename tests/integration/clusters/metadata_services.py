"""A local stand-in of the metadata services of AWS, Google Cloud and Azure.

It asks for what they ask for: EC2's token, the two headers, Azure's versions; and holds back a
request that waits for a change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tests.adaptive_timeouts import patient

_TOKEN = "a-token"
_GCP = "/computeMetadata/v1/instance"


class MetadataService:
    """Serves documents by path; those that are missing are not found.

    Attributes:
        url: where it serves.
        asked: the paths that were asked for, in order.
        refuses: answers each request with 503.
        is_silent: answers none.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.refuses = self.is_silent = False
        self._documents = {
            "/latest/meta-data/events/maintenance/scheduled": "[]",
            f"{_GCP}/preempted": "FALSE",
            f"{_GCP}/maintenance-event": "NONE",
            "/metadata/instance/compute/name": "node_0",
            "/metadata/scheduledevents": '{"DocumentIncarnation":1,"Events":[]}',
        }
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._tokens = {_TOKEN}

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def serve(self, path: str, document: str | None) -> None:
        """Change a document; None: there is none any more."""

        def change() -> None:
            if document is None:
                self._documents.pop(path, None)
            else:
                self._documents[path] = document
            self._changed.set()
            self._changed = asyncio.Event()

        self._run(change)

    def expire_tokens(self) -> None:
        """Refuse EC2's tokens that were issued so far."""
        self._run(self._tokens.clear)

    def _run(self, change: object) -> None:
        done = threading.Event()

        def act() -> None:
            change()  # type: ignore[operator]
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(patient(60))

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if self.is_silent:
            await asyncio.Event().wait()
        if self.refuses:
            return web.Response(status=503)
        headers = request.headers
        if request.path.startswith("/latest/"):
            if (request.method, request.path) == ("PUT", "/latest/api/token"):
                if "X-aws-ec2-metadata-token-ttl-seconds" not in headers:
                    return web.Response(status=400)
                self._tokens.add(_TOKEN)
                return web.Response(text=_TOKEN)
            if headers.get("X-aws-ec2-metadata-token") not in self._tokens:
                return web.Response(status=401)
        elif request.path.startswith("/metadata/"):
            if headers.get("Metadata") != "true" or "api-version" not in request.query:
                return web.Response(status=400)
        elif headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        if request.query.get("wait_for_change") == "true":
            await self._wait(request)
        document = self._documents.get(request.path)
        if document is None:
            return web.Response(status=404)
        return web.Response(text=document, headers={"ETag": _etag(document)})

    async def _wait(self, request: web.Request) -> None:
        async def change() -> None:
            while _etag(self._documents[request.path]) == request.query["last_etag"]:
                await self._changed.wait()

        try:
            await asyncio.wait_for(change(), float(request.query["timeout_sec"]))
        except TimeoutError:
            return


def _etag(document: str) -> str:
    return f"{hash(document):x}"


@contextmanager
def metadata_service() -> Iterator[MetadataService]:
    """Serve on a port of this machine, in a thread of its own."""
    service = MetadataService()
    loop = service._loop
    thread = threading.Thread(target=loop.run_forever, name="metadata", daemon=True)
    thread.start()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service._answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop() -> None:
        await runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(patient(60))
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(patient(60))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(patient(60))
        loop.close()
