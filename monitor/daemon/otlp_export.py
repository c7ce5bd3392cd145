"""Pushes telemetry to OpenTelemetry collectors: events as logs, series, recoveries and steps.

A collector that does not answer costs the daemon nothing but memory: a bounded queue of events and
spans, of which the oldest are dropped. An outage is logged once, when it begins, and once when it
ends, with what was dropped. Metrics are not queued: the next push has their newest values.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import numpy as np

from keepstep.monitor.daemon.otlp_settings import Endpoint, OtlpSettings, Signal
from keepstep.monitor.daemon.posting import Posted, post
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.records import Phase
from keepstep.monitor.views.events import resource_of
from keepstep.monitor.views.exporter import series
from keepstep.monitor.views.otlp import (
    Message,
    Span,
    logs_request,
    metrics_request,
    recovery_spans,
    spans_request,
    step_spans,
)
from keepstep.monitor.views.service import Backend
from keepstep.monitor.watch.component_faults import ComponentFaults
from keepstep.monitor.watch.step_times import newest_step
from keepstep.monitor.watch.watch import Watch

_LOG = logging.getLogger("keepstep.monitor")
_COMPONENT = "OpenTelemetry export"
_EVERY_S = 5.0
"""Between pushes of logs and spans; a step is a span if it is the newest at such a time."""
_MOST_WAITING, _MOST_IN_REQUEST = 2048, 512
_LAST_S = 3.0
"""For so long what waits is still pushed when the daemon ends."""


class OtlpExporter:
    """Pushes while `run` runs; `close` pushes what waits and ends.

    Args:
        settings: where to, and how.
        source: the daemon.
        node: this node's name.
        faults: counts what was dropped.
        every_s: seconds between pushes of logs and spans.

    Raises:
        MonitorError: a certificate cannot be read.
    """

    def __init__(
        self,
        settings: OtlpSettings,
        source: Backend,
        node: str,
        faults: ComponentFaults,
        every_s: float = _EVERY_S,
    ) -> None:
        self._settings = settings
        self._source = source
        self._faults = faults
        self._every_s = every_s
        self._resource = resource_of(source.job, node) | dict(settings.resource)
        self._events: deque[Mapping[str, Any]] = deque()
        self._spans: deque[Span] = deque()
        self._failing: set[Signal] = set()
        self._dropped = 0
        self._began_s = time.time()
        self._last_recovery = (0.0, 0)
        self._last_step = 0
        connector = aiohttp.TCPConnector(ssl=_tls(settings))
        self._session = aiohttp.ClientSession(connector=connector, trust_env=True)

    def write(self, event: Mapping[str, Any]) -> None:
        """Queue an event as a log record."""
        if Signal.LOGS in self._settings.endpoints:
            self._queue(self._events, event)

    async def run(self) -> None:
        """Push without end. A defect here is counted and leaves the rest of the daemon running."""
        metrics_due_s = 0.0
        while True:
            try:
                pushes = [self._push_logs(), self._push_spans()]
                if time.monotonic() >= metrics_due_s:
                    metrics_due_s = time.monotonic() + self._settings.metrics_every_s
                    pushes.append(self._push_metrics())
                await asyncio.gather(*pushes)
            except Exception as error:  # noqa: BLE001 - the other components must go on
                self._faults.record(_COMPONENT, error)
            await asyncio.sleep(min(self._every_s, self._settings.metrics_every_s))

    async def close(self) -> None:
        """Push what waits, for a moment, and end the connections."""
        try:
            async with asyncio.timeout(_LAST_S):
                await asyncio.gather(
                    self._push_waiting(Signal.LOGS, self._events, logs_request),
                    self._push_waiting(Signal.TRACES, self._spans, spans_request),
                )
        except TimeoutError:
            pass  # That it does not answer is said already.
        finally:
            await self._session.close()

    async def _push_logs(self) -> None:
        await self._push_waiting(Signal.LOGS, self._events, logs_request)

    async def _push_spans(self) -> None:
        if Signal.TRACES not in self._settings.endpoints:
            return
        for span in (*self._new_recoveries(), *await self._source.on_watch(self._newest_step)):
            self._queue(self._spans, span)
        await self._push_waiting(Signal.TRACES, self._spans, spans_request)

    async def _push_metrics(self) -> None:
        if Signal.METRICS not in self._settings.endpoints:
            return
        source = self._source
        families = await source.on_watch(lambda watch: series(watch, source.job, source.job_status))
        message = metrics_request(self._resource, families, self._began_s, time.time())
        await self._post(Signal.METRICS, message)

    def _new_recoveries(self) -> list[Span]:
        """Return the recoveries that were completed since the daemon began and the last push."""
        status, spans = self._source.job_status, list[Span]()
        for recovery in status.recoveries if status is not None else ():
            assert status is not None, "it has recoveries"
            key = (status.began_at_s, recovery.generation)
            if key > self._last_recovery and recovery.stepped_at_s > 0:
                self._last_recovery = key
                if recovery.stepped_at_s >= self._began_s:
                    spans += recovery_spans(self._source.job, status.began_at_s, recovery)
        return spans

    def _newest_step(self, watch: Watch) -> list[Span]:
        """Return the newest step that every rank has ended, unless it was pushed already."""
        views = watch.rank_views
        step = newest_step(views.progress())
        ranks = views.ranks()
        if not watch.diagnoses or not ranks or step is None or step == self._last_step:
            return []
        took_s = [views.tables[rank.state.rank].seconds([step], Phase.STEP)[0] for rank in ranks]
        if np.isnan(took_s).all():
            return []
        self._last_step = step
        slowest = ranks[int(np.nanargmax(took_s))].state
        records = views.records_of_step([slowest.rank], step, include_later_open=False)
        to_unix_s = time.time() - time.monotonic()
        return step_spans(
            self._source.job, slowest.generation, step, records[slowest.rank], len(ranks), to_unix_s
        )

    def _queue(self, waiting: deque[Any], item: Any) -> None:
        if len(waiting) >= _MOST_WAITING:
            waiting.popleft()
            self._count_dropped(1)
        waiting.append(item)

    async def _push_waiting(
        self,
        signal: Signal,
        waiting: deque[Any],
        request: Callable[[Mapping[str, Any], list[Any]], Message],
    ) -> None:
        """Push what waits, oldest first, until all is gone or the collector does not answer."""
        while waiting:
            batch = [waiting.popleft() for _ in range(min(len(waiting), _MOST_IN_REQUEST))]
            is_done = False
            try:
                outcome = await self._post(signal, request(self._resource, batch))
                is_done = not (outcome.failure and outcome.may_retry)
            finally:
                if not is_done:
                    # Also if the daemon ends meanwhile. Some of it may have no room any more.
                    surplus = max(0, len(batch) + len(waiting) - _MOST_WAITING)
                    waiting.extendleft(reversed(batch[surplus:]))
                    self._count_dropped(surplus)
            if not is_done:
                return
            self._count_dropped(len(batch) if outcome.failure else 0)

    async def _post(self, signal: Signal, message: Message) -> Posted:
        endpoint = self._settings.endpoints[signal]
        body = json.dumps(message, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json", **endpoint.headers}
        if endpoint.compresses:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        outcome = await post(self._session, endpoint.url, body, headers, endpoint.timeout_s)
        self._log(signal, endpoint, outcome.failure or _rejected(outcome.answer))
        return outcome

    def _log(self, signal: Signal, endpoint: Endpoint, failure: str) -> None:
        """Log that a collector began to fail, or answers again."""
        if failure and signal not in self._failing:
            self._failing.add(signal)
            _LOG.warning(
                "%s are not pushed to the collector at %s: %s; up to %d events and spans are kept "
                "for it, and the job is watched all the same",
                signal, endpoint.place, failure, _MOST_WAITING,
            )  # fmt: skip
        elif not failure and signal in self._failing:
            self._failing.discard(signal)
            _LOG.info(
                "%s are pushed to the collector at %s again; %d events and spans were dropped so "
                "far",
                signal, endpoint.place, self._dropped,
            )  # fmt: skip

    def _count_dropped(self, count: int) -> None:
        """Count among the faults, in /metrics, without a line for each."""
        if count:
            self._dropped += count
            self._faults.counts[_COMPONENT] = self._faults.counts.get(_COMPONENT, 0) + count


def _rejected(answer: bytes) -> str:
    """Return why a collector rejected some of what it was sent; "" if it took all."""
    try:
        partial = json.loads(answer or b"{}").get("partialSuccess", {})
        rejected = sum(int(value) for key, value in partial.items() if key.startswith("rejected"))
        return f"it rejected {rejected}: {partial.get('errorMessage', '')}" if rejected else ""
    except (ValueError, AttributeError, TypeError):
        return ""  # Not all collectors answer with JSON.


def _tls(settings: OtlpSettings) -> ssl.SSLContext | bool:
    """Return how collectors are verified.

    Raises:
        MonitorError: a certificate cannot be read.
    """
    if not settings.certificate and not settings.client_certificate:
        return True
    try:
        context = ssl.create_default_context(cafile=settings.certificate or None)
        if settings.client_certificate:
            context.load_cert_chain(settings.client_certificate, settings.client_key or None)
    except (OSError, ssl.SSLError) as error:
        raise MonitorError(
            f"a certificate of OTEL_EXPORTER_OTLP_* cannot be read: {error}"
        ) from error
    return context
