"""Serves the daemon over HTTP.

It serves summaries for the parent daemon, JSON for the page and the terminal, `/metrics` for
Prometheus, and the page itself. Every request for the job's data requires a signature, by which
other daemons ask (`keepstep.monitor.signing`), or the bearer token, which the page and Prometheus
have; the page's own files contain no data of the job and require neither. If the daemon is
configured so, requests from loopback need none, provided that they also name loopback as their
host, and that no page of another site has made the browser send them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from keepstep.monitor.contracts import JobStatus
from keepstep.monitor.errors import ProtocolViolation
from keepstep.monitor.records import Phase
from keepstep.monitor.secret import is_authorized, is_loopback
from keepstep.monitor.signing import (
    CHALLENGE_HEADER,
    SCHEME,
    SIGNATURE_HEADER,
    Request,
    RequestVerifier,
    sign_answer,
)
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.tree.child_registry import Cursor
from keepstep.monitor.tree.node_clocks import decode_clocks, encode_clocks
from keepstep.monitor.tree.summary import Summary, encode
from keepstep.monitor.views.exporter import CONTENT_TYPE, exposition
from keepstep.monitor.views.pages import (
    delay_matrices,
    heat,
    operations_for_matrices,
    overview,
    step_timeline,
)
from keepstep.monitor.views.shared_answers import SharedAnswers
from keepstep.monitor.watch.job_events import JobEvent
from keepstep.monitor.watch.verdict_notes import NoteRequest, VerdictNote
from keepstep.monitor.watch.watch import Watch

DASHBOARD = Path(__file__).parent / "dashboard"
_Result = TypeVar("_Result")

_MOST_COLUMNS, _MOST_ROWS, _MOST_SPANS, _MOST_TIMELINES = 2000, 1024, 5000, 256
_FRESH_S, _MATRICES_FRESH_S = 0.9, 3.0
"""For so long an answer serves all pages: they ask once a second, and matrices are means over
minutes."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Backend(Protocol):
    """The calls that the service makes to the daemon."""

    job: str

    async def on_watch(self, function: Callable[[Watch], _Result]) -> _Result:
        """Call a function on the thread that owns the watch, and return its result."""

    def recorded(self) -> Sequence[str]:
        """Return the jobs that are recorded on this node."""

    def other_pages(self) -> Mapping[str, str]:
        """Return the pages of other jobs' monitors on this node, by job."""

    async def stacks(self, rank: int) -> dict[str, Any]:
        """Return the stacks of a rank, on any node."""

    async def steps(self, first: int, last: int) -> Summary:
        """Return the records of steps `first` to `last` of all ranks, on any node."""

    async def note_verdict(self, number: int, request: NoteRequest) -> VerdictNote | None:
        """Record a person's note on the verdict of this number; KeyError if there is none."""

    async def update_clocks(self, clocks: Mapping[str, ClockOffset]) -> None:
        """Set the offsets of nodes' clocks, here and at the child daemons."""

    @property
    def job_status(self) -> JobStatus | None:
        """The last status of the job's runtime."""

    @property
    def events(self) -> Sequence[JobEvent]:
        """Events of the job since the daemon started, oldest first."""


def application(
    backend: Backend,
    secret: bytes,
    *,
    opens_to_loopback: bool,
    on_authorized: Callable[[web.Request], None] = lambda _: None,
) -> web.Application:
    """Return the web application.

    Args:
        backend: provides the data.
        secret: the job's.
        opens_to_loopback: whether requests from this machine to its loopback address need no token.
        on_authorized: called with each request that may have what it asks for.
    """
    handlers = _Handlers(backend)
    served = web.Application(middlewares=[_authorization(secret, opens_to_loopback, on_authorized)])
    served.add_routes(
        [
            web.get("/", handlers.page),
            web.get("/v1/summary", handlers.summary),
            web.get("/v1/records", handlers.records),
            web.get("/v1/clocks", handlers.clocks),
            web.post("/v1/clocks", handlers.set_clocks),
            web.get("/v1/overview", handlers.overview),
            web.get("/v1/heat", handlers.heat),
            web.get("/v1/delays", handlers.delays),
            web.get("/v1/steps/{step:newest|[0-9]{1,9}}", handlers.step),
            web.get("/v1/stacks/{rank:[0-9]{1,9}}", handlers.stacks),
            web.post("/v1/verdicts/{number:[0-9]{1,9}}/note", handlers.note_verdict),
            web.get("/metrics", handlers.metrics),
            web.static("/static", DASHBOARD),
        ]
    )
    return served


def _authorization(
    secret: bytes, opens_to_loopback: bool, on_authorized: Callable[[web.Request], None]
) -> Middleware:
    """Return the middleware that requires authorization, signs answers and adds headers."""
    verifier = RequestVerifier(secret)

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_signed = False
        if request.path.startswith(("/v1/", "/metrics")):
            authorization = request.headers.get("Authorization", "")
            if authorization.startswith(f"{SCHEME} "):
                # At most a mebibyte, aiohttp's limit.
                signed = Request(request.method, request.raw_path, await request.read())
                is_signed = verifier.accepts(authorization, signed, time.monotonic())
            is_open = opens_to_loopback and _is_local_read(request)
            if not is_signed and not is_open and not is_authorized(authorization, secret):
                raise web.HTTPUnauthorized(
                    text="this job's token is required: Authorization: Bearer TOKEN; "
                    "`keepstep monitor --print-token` prints it, "
                    "with the --job and --secret-file of this daemon\n",
                    headers={
                        "WWW-Authenticate": "Bearer",
                        CHALLENGE_HEADER: verifier.challenge(time.monotonic()),
                    },
                )
            on_authorized(request)
        response = await handler(request)
        response.headers.update(_HEADERS)
        if is_signed:
            assert isinstance(response, web.Response), "only the page's own files are streamed"
            body = bytes(response.body) if isinstance(response.body, bytes | bytearray) else b""
            response.headers[SIGNATURE_HEADER] = sign_answer(
                secret, request.headers["Authorization"], response.status, body
            )
        return response

    return authorize


def _is_local_read(request: web.Request) -> bool:
    """Return whether a request reads from this machine, addressed to its loopback.

    Only GET, and not what a page of another site makes a browser send: the page cannot read the
    answer, but the request would cause work, such as a dump of stacks. Browsers show that in these
    headers, which a page cannot change; other programs send neither.
    """
    is_from_loopback = is_loopback(request.remote or "")
    origin = request.headers.get("Origin")
    is_of_other_site = request.headers.get("Sec-Fetch-Site", "none") not in (
        "same-origin",
        "none",
    ) or origin not in (None, f"{request.scheme}://{request.host}")
    return (
        is_from_loopback
        and is_loopback(request.host)
        and request.method == "GET"
        and not is_of_other_site
    )


class _Handlers:
    """Answers the requests from a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._answers = SharedAnswers()

    async def page(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(DASHBOARD / "index.html")

    async def summary(self, request: web.Request) -> web.Response:
        incarnation = request.query.get("incarnation", "")
        since = _number(request, "since", 0, 1 << 62)
        wants_records = _number(request, "records", 1, 1)
        records_since = _number(request, "records_since", since, 1 << 62)
        budget = _number(request, "budget", 256, 1 << 20)
        cursor = Cursor(incarnation, since, records_since if wants_records else None)
        # Encoded on that thread too: the arrays of a summary change with the next reading.
        data = await self._backend.on_watch(lambda watch: encode(watch.summary(cursor, budget)))
        return web.Response(body=data, content_type="application/octet-stream")

    async def records(self, request: web.Request) -> web.Response:
        first, last = (_number(request, name, 0, (1 << 32) - 1) for name in ("first", "last"))
        summary = await self._backend.steps(first, last)
        data = await asyncio.to_thread(encode, summary)
        return web.Response(body=data, content_type="application/octet-stream")

    async def clocks(self, _: web.Request) -> web.Response:
        clocks = await self._backend.on_watch(Watch.clocks)
        return web.Response(body=encode_clocks(clocks), content_type="application/json")

    async def set_clocks(self, request: web.Request) -> web.Response:
        try:
            await self._backend.update_clocks(decode_clocks(await request.read()))
        except ProtocolViolation as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        return web.Response(status=204)

    async def overview(self, request: web.Request) -> web.Response:
        backend = self._backend
        return await self._json(
            request,
            lambda watch: overview(
                watch,
                backend.job,
                backend.job_status,
                backend.recorded,
                backend.events,
                backend.other_pages(),
            ),
        )

    async def heat(self, request: web.Request) -> web.Response:
        columns = max(1, _number(request, "columns", 240, _MOST_COLUMNS))
        rows = max(1, _number(request, "rows", 64, _MOST_ROWS))
        phase = _phase(request.query.get("phase", "step"))
        return await self._json(request, lambda watch: heat(watch, columns, rows, phase))

    async def delays(self, request: web.Request) -> web.Response:
        rows = max(1, _number(request, "rows", 32, 128))

        async def compute() -> dict[str, Any]:
            operations = await self._backend.on_watch(operations_for_matrices)
            # Takes too long for the thread that diagnoses.
            return await asyncio.to_thread(delay_matrices, operations, rows)

        return await self._shared(request, _MATRICES_FRESH_S, compute)

    async def step(self, request: web.Request) -> web.Response:
        name = request.match_info["step"]
        step = None if name == "newest" else int(name)
        first = _number(request, "first", 0, 1 << 31)
        count = _number(request, "count", 64, _MOST_TIMELINES)
        limit = _number(request, "limit", 400, _MOST_SPANS)

        def read_timeline(watch: Watch) -> dict[str, Any]:
            histories = watch.rank_views.ranks()[first : first + count]
            return step_timeline(watch, step, [rank.state.rank for rank in histories], limit)

        return await self._json(request, read_timeline)

    async def stacks(self, request: web.Request) -> web.Response:
        stacks = await self._backend.stacks(int(request.match_info["rank"]))
        return _json_response(json.dumps(stacks))

    async def note_verdict(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        try:
            note = await self._backend.note_verdict(
                number, NoteRequest.decode(await request.read())
            )
        except ProtocolViolation as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        except KeyError:
            raise web.HTTPNotFound(text=f"no verdict {number} holds here\n") from None
        return _json_response(json.dumps({"note": None if note is None else note.to_json()}))

    async def metrics(self, _: web.Request) -> web.Response:
        backend = self._backend
        data = await backend.on_watch(
            lambda watch: exposition(watch, backend.job, backend.job_status)
        )
        return web.Response(body=data, headers={"Content-Type": CONTENT_TYPE})

    async def _json(
        self, request: web.Request, function: Callable[[Watch], dict[str, Any]]
    ) -> web.Response:
        return await self._shared(request, _FRESH_S, lambda: self._backend.on_watch(function))

    async def _shared(
        self,
        request: web.Request,
        fresh_s: float,
        compute: Callable[[], Awaitable[dict[str, Any]]],
    ) -> web.Response:
        async def encoded() -> str:
            return json.dumps(await compute())

        return _json_response(await self._answers.get(request.path_qs, fresh_s, encoded))


def _json_response(text: str) -> web.Response:
    response = web.json_response(text=text)
    response.enable_compression()
    return response


def _phase(name: str) -> Phase:
    """Return the phase of a query.

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
        web.HTTPBadRequest: it is not a number, or out of bounds.
    """
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > most:
        raise web.HTTPBadRequest(text=f"{name} must be a number from 0 to {most}, not {text!r}\n")
    return int(text)
