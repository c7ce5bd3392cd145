"""Posts to other programs over HTTP, and says whether it arrived or may be tried again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

_MOST_NBYTES = 1 << 16
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Posted:
    """The outcome of a request.

    Args:
        failure: why it failed, without anything of its address or headers; "" if it arrived.
        may_retry: whether the same request may succeed later.
        answer: what the other program answered.
    """

    failure: str = ""
    may_retry: bool = False
    answer: bytes = b""


async def post(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout_s: float,
) -> Posted:
    """Post a body, and return the outcome; no failure of the network is raised."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(
            url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            answer = await response.content.read(_MOST_NBYTES)
            if response.status < 300:
                return Posted(answer=answer)
            return Posted(f"it answers status {response.status}", response.status in _RETRIED)
    except TimeoutError:
        return Posted(f"it gives no answer within {timeout_s:g} s", may_retry=True)
    except aiohttp.ClientConnectorError as error:
        number = error.os_error.errno or 0
        reason = os.strerror(number) if number > 0 else error.os_error.strerror or "no connection"
        return Posted(reason, may_retry=True)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # Its text may contain the address, which may be a secret.
        return Posted(type(error).__name__, may_retry=True)
