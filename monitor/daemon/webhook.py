"""Posts verdicts to a webhook: each once when it opens, and once when it closes.

The queue is bounded and so is the number of tries, so a webhook that does not answer costs the
daemon nothing. The address may contain a secret: only its host is logged.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import aiohttp

from keepstep.monitor.daemon.posting import post
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.views.events import CLOSED, OPENED
from keepstep.monitor.views.webhook import WebhookAddress, webhook_content
from keepstep.monitor.watch.component_faults import ComponentFaults

_COMPONENT = "webhook"
_TIMEOUT_S = 10.0
_PAUSES_S = (1.0, 4.0, 16.0)
"""Between the tries of one verdict."""
_MOST_WAITING = 256
_LAST_S = 3.0
"""For so long verdicts that wait are still posted when the daemon ends."""


class Webhook:
    """Posts verdicts while `run` runs; `close` posts what waits and ends.

    Args:
        address: where to.
        faults: counts verdicts that could not be posted.
        pauses_s: between the tries of one verdict.
    """

    def __init__(
        self,
        address: WebhookAddress,
        faults: ComponentFaults,
        pauses_s: tuple[float, ...] = _PAUSES_S,
    ) -> None:
        self._address = address
        self._faults = faults
        self._pauses_s = pauses_s
        self._waiting: deque[bytes] = deque()
        self._has_some = asyncio.Event()
        self._session = aiohttp.ClientSession(trust_env=True)

    def write(self, event: Mapping[str, Any]) -> None:
        """Queue a verdict; other events are not posted."""
        if event["event_name"] not in (OPENED, CLOSED):
            return
        content = webhook_content(event, is_slack=self._address.is_slack)
        if len(self._waiting) >= _MOST_WAITING:
            self._report(f"{_MOST_WAITING} verdicts wait, so one more is not posted")
            return
        self._waiting.append(json.dumps(content).encode())
        self._has_some.set()

    async def run(self) -> None:
        """Post what is queued, in order, without end."""
        while True:
            await self._has_some.wait()
            await self._post_waiting()

    async def close(self) -> None:
        """Post what waits, for a moment, and end the connections."""
        try:
            async with asyncio.timeout(_LAST_S):
                await self._post_waiting()
        except TimeoutError:
            self._report("the daemon ends, and verdicts still wait")
        finally:
            await self._session.close()

    async def _post_waiting(self) -> None:
        while self._waiting:
            # Removed when it is posted: the daemon may end meanwhile.
            await self._post(self._waiting[0])
            self._waiting.popleft()
        self._has_some.clear()

    async def _post(self, content: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        failure = ""
        for pause_s in (*self._pauses_s, None):
            outcome = await post(self._session, self._address.url, content, headers, _TIMEOUT_S)
            if not outcome.failure:
                return
            failure = outcome.failure
            if pause_s is None or not outcome.may_retry:
                break
            await asyncio.sleep(pause_s)
        self._report(f"a verdict was not posted: {failure}")

    def _report(self, text: str) -> None:
        self._faults.record(_COMPONENT, MonitorError(f"{self._address.place}: {text}"))
