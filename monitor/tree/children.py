"""Queries a daemon's children: one HTTP client with the job's token, owned by the daemon."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import aiohttp

from keepstep.monitor.errors import MonitorUnreachable, ProtocolViolation
from keepstep.monitor.node.stacks import TIMEOUT_S as STACKS_TIMEOUT_S
from keepstep.monitor.secret import bearer_token
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.tree.node_clocks import encode_clocks
from keepstep.monitor.tree.summary import MAX_NBYTES, Summary, decode

_TIMEOUT_S = 5.0
_CHUNK_NBYTES = 1 << 18


class Children:
    """Requests summaries and stacks from child daemons. `close` ends its connections."""

    def __init__(self, secret: bytes) -> None:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {bearer_token(secret)}"}
        )

    async def summary(self, url: str, incarnation: str, since: int, budget: int) -> Summary:
        """Return the summary of the daemon at `url`.

        Args:
            url: of the daemon.
            incarnation, since: request what has changed since this number of this incarnation.
            budget: finished operations to send of each rank, at most.

        Raises:
            MonitorUnreachable: it does not answer, or refuses.
            ProtocolViolation: its answer is not a summary.
        """
        query = urlencode({"incarnation": incarnation, "since": since, "budget": budget})
        data = await self._get(f"{url.rstrip('/')}/v1/summary?{query}", _TIMEOUT_S, MAX_NBYTES)
        return decode(data)

    async def send_clocks(self, url: str, clocks: Mapping[str, ClockOffset]) -> None:
        """Send the offsets of nodes' clocks to the daemon at `url`.

        Raises:
            MonitorUnreachable: it does not answer, or refuses.
            ProtocolViolation: its answer is longer than a monitor's.
        """
        await self._ask(
            "POST", f"{url.rstrip('/')}/v1/clocks", _TIMEOUT_S, 1 << 16, encode_clocks(clocks)
        )

    async def stacks(self, url: str, rank: int) -> dict[str, Any]:
        """Return the stacks of a rank from the child that has it, or `{"error": reason}`."""
        try:
            data = await self._get(
                f"{url.rstrip('/')}/v1/stacks/{rank}", STACKS_TIMEOUT_S + _TIMEOUT_S, 1 << 24
            )
            return parse_object(data)
        except (MonitorUnreachable, ProtocolViolation) as error:
            return {"error": str(error)}

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def _get(self, address: str, timeout_s: float, limit_nbytes: int) -> bytes:
        return await self._ask("GET", address, timeout_s, limit_nbytes)

    async def _ask(
        self,
        method: str,
        address: str,
        timeout_s: float,
        limit_nbytes: int,
        body: bytes | None = None,
    ) -> bytes:
        where, timeout = urlsplit(address).netloc, aiohttp.ClientTimeout(timeout_s)
        try:
            async with self._session.request(
                method, address, data=body, timeout=timeout
            ) as response:
                if response.status == 401:
                    raise MonitorUnreachable(
                        f"the monitor at {where} refused our token: does it monitor another job?"
                    )
                if not response.ok:
                    raise MonitorUnreachable(
                        f"the monitor at {where} answered status {response.status}"
                    )
                parts, nbytes = [], 0
                async for part in response.content.iter_chunked(_CHUNK_NBYTES):
                    nbytes += len(part)
                    if nbytes > limit_nbytes:
                        raise ProtocolViolation(
                            f"the monitor at {where} sends more than {limit_nbytes} bytes"
                        )
                    parts.append(part)
                return b"".join(parts)
        except TimeoutError as error:
            raise MonitorUnreachable(
                f"the monitor at {where} gave no answer within {timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MonitorUnreachable(f"no monitor answers at {where}: {error}") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes encode.

    Raises:
        ProtocolViolation: they do not encode one.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ProtocolViolation(f"the answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolViolation("the answer is not a JSON object")
    return value
