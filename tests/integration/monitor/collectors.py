"""Runs a program that daemons push to: it keeps each request, and answers as a test says."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Collector:
    """The requests by path, and the statuses that the next ones are answered with."""

    url: str = ""
    requests: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    tries: int = 0

    async def receive(self, request: web.Request) -> web.Response:
        self.tries += 1
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.headers.append(dict(request.headers))
        self.requests.setdefault(request.path, []).append(json.loads(body))
        return web.json_response({})


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[Collector]:
    collector = Collector()
    served = web.Application()
    served.router.add_post("/{path:.*}", collector.receive)
    runner = web.AppRunner(served, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()
