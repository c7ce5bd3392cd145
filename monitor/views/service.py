"""The daemon's HTTP face: summaries for the daemon above, JSON for the page and the terminal, `/metrics` for Prometheus, and
the page itself.

Everything that tells of the job wants the bearer token; the page's own files hold nothing of the job and do not. Where the
daemon was told so, the token is not wanted from loopback, if the request also names loopback as its host: another site's
page in the same browser cannot do that.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.records import Phase
from keepstep.monitor.secret import is_authorized, is_loopback
from keepstep.monitor.tree.node_clocks import NodeClock, decode_clocks
from keepstep.monitor.tree.summary import encode
from keepstep.monitor.views.exporter import CONTENT_TYPE, exposition
from keepstep.monitor.views.pages import delay_matrices, heat, overview, step_timeline
from keepstep.monitor.watch.watch import Watch

DASHBOARD = Path(__file__).parent / "dashboard"
_Result = TypeVar("_Result")
_MOST_COLUMNS, _MOST_ROWS, _MOST_SPANS, _MOST_TIMELINES = 2000, 1024, 5000, 256
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Backend(Protocol):
    """What the service needs of the daemon."""

    job: str

    async def on_watch(self, function: Callable[[Watch], _Result]) -> _Result:
        """Have a function answered on the thread that owns the watch."""

    def recorded(self) -> Sequence[str]:
        """Return the jobs that are recorded on this node."""

    async def stacks(self, rank: int) -> dict[str, Any]:
        """Return the stacks of a rank, on whichever node it is."""

    async def update_clocks(self, clocks: Mapping[str, NodeClock]) -> None:
        """Hear how far nodes' clocks are off the job's, here and below."""

    @property
    def job_status(self) -> JobStatus | None:
        """What the job's runtime told last."""


def application(backend: Backend, secret: bytes, *, opens_to_loopback: bool) -> web.Application:
    """Return the web application.

    Args:
        backend: who answers.
        secret: the job's.
        opens_to_loopback: whether requests from this machine to its loopback address need no token.
    """

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith(("/v1/", "/metrics")):
            from_here = (
                opens_to_loopback
                and is_loopback(request.remote or "")
                and is_loopback(request.host)
            )
            # Pages of other sites, open in a browser here, can post to this machine too, though not read.
            from_here = from_here and request.method == "GET"
            if not from_here and not is_authorized(request.headers.get("Authorization"), secret):
                raise web.HTTPUnauthorized(
                    text="this job's token is wanted: Authorization: Bearer TOKEN; "
                    "`keepstep monitor --print-token` prints it, with the --job and --secret-file of this daemon\n",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        response = await handler(request)
        response.headers.update(_HEADERS)
        return response

    async def summary(request: web.Request) -> web.Response:
        incarnation = request.query.get("incarnation", "")
        since, budget = (
            _number(request, "since", 0, 1 << 62),
            _number(request, "budget", 256, 1 << 20),
        )
        # Encoded there too: what a summary refers to changes with the next reading.
        data = await backend.on_watch(
            lambda watch: encode(watch.summary(incarnation, since, budget))
        )
        return web.Response(body=data, content_type="application/octet-stream")

    async def clocks(request: web.Request) -> web.Response:
        try:
            await backend.update_clocks(decode_clocks(await request.read()))
        except ProtocolViolation as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        return web.Response(status=204)

    async def tell_overview(_: web.Request) -> web.Response:
        return _json(
            await backend.on_watch(
                lambda watch: overview(watch, backend.job, backend.job_status, backend.recorded)
            )
        )

    async def tell_heat(request: web.Request) -> web.Response:
        columns, rows = (
            _number(request, "columns", 240, _MOST_COLUMNS),
            _number(request, "rows", 64, _MOST_ROWS),
        )
        phase = _phase(request.query.get("phase", "step"))
        return _json(
            await backend.on_watch(lambda watch: heat(watch, max(1, columns), max(1, rows), phase))
        )

    async def tell_delays(request: web.Request) -> web.Response:
        rows = _number(request, "rows", 32, 128)
        return _json(await backend.on_watch(lambda watch: delay_matrices(watch, max(1, rows))))

    async def tell_step(request: web.Request) -> web.Response:
        name = request.match_info["step"]
        step = None if name == "newest" else int(name)
        first, count = (
            _number(request, "first", 0, 1 << 31),
            _number(request, "count", 64, _MOST_TIMELINES),
        )
        limit = _number(request, "limit", 400, _MOST_SPANS)

        def tell(watch: Watch) -> dict[str, Any]:
            ranks = [kept.state.rank for kept in watch.ranks()][first : first + count]
            return step_timeline(watch, step, ranks, limit)

        return _json(await backend.on_watch(tell))

    async def tell_stacks(request: web.Request) -> web.Response:
        return _json(await backend.stacks(int(request.match_info["rank"])))

    async def metrics(_: web.Request) -> web.Response:
        data = await backend.on_watch(
            lambda watch: exposition(watch, backend.job, backend.job_status)
        )
        return web.Response(body=data, headers={"Content-Type": CONTENT_TYPE})

    async def page(_: web.Request) -> web.FileResponse:
        return web.FileResponse(DASHBOARD / "index.html")

    served = web.Application(middlewares=[guard])
    served.add_routes(
        [
            web.get("/", page),
            web.get("/v1/summary", summary),
            web.post("/v1/clocks", clocks),
            web.get("/v1/overview", tell_overview),
            web.get("/v1/heat", tell_heat),
            web.get("/v1/delays", tell_delays),
            web.get("/v1/steps/{step:newest|[0-9]{1,9}}", tell_step),
            web.get("/v1/stacks/{rank:[0-9]{1,9}}", tell_stacks),
            web.get("/metrics", metrics),
            web.static("/static", DASHBOARD),
        ]
    )
    return served


def _json(told: dict[str, Any]) -> web.Response:
    response = web.json_response(told)
    response.enable_compression()
    return response


def _phase(name: str) -> Phase:
    """Return the phase that a query names.

    Raises:
        web.HTTPBadRequest: there is none of that name.
    """
    try:
        return Phase[name.upper().replace(" ", "_")]
    except KeyError:
        raise web.HTTPBadRequest(text=f"there is no phase {name!r}\n") from None


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number of the query.

    Raises:
        web.HTTPBadRequest: it is none, or out of bounds.
    """
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > most:
        raise web.HTTPBadRequest(text=f"{name} must be a number from 0 to {most}, not {text!r}\n")
    return int(text)
