"""Repeats idempotent calls while the coordinator does not answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from keepstep.elastic.errors import StoreUnavailable

log = logging.getLogger("keepstep")

T = TypeVar("T")

_POLL_S = 0.2


async def outlast_outage(call: Callable[[], Awaitable[T]], longest_s: float = math.inf) -> T:
    """Repeat a call until the coordinator answers.

    Args:
        call: may be repeated also if its outcome is unknown.
        longest_s: for how long the coordinator may be away, from the first failure on.

    Raises:
        StoreUnavailable: it is away for longer.
    """
    until_s = math.inf
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            until_s = min(until_s, time.monotonic() + longest_s)
            if time.monotonic() >= until_s:
                raise
            log.debug("%s; trying again", error)
            await asyncio.sleep(_POLL_S)
