"""Queries a daemon's children: summaries and stacks up the tree, clock offsets down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from keepstep.monitor.errors import MonitorUnreachable, ProtocolViolation
from keepstep.monitor.node.stacks import TIMEOUT_S as STACKS_TIMEOUT_S
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.tree.child_registry import Cursor
from keepstep.monitor.tree.monitor_client import MonitorClient
from keepstep.monitor.tree.node_clocks import decode_clocks, encode_clocks
from keepstep.monitor.tree.summary import MAX_NBYTES, Summary, decode

_TIMEOUT_S = 5.0
_STEPS_TIMEOUT_S = 30.0


async def ask_steps(client: MonitorClient, url: str, first: int, last: int) -> Summary:
    """Return the records of steps `first` to `last` from a daemon; errors as `Children.steps`."""
    address = f"{url.rstrip('/')}/v1/records?{urlencode({'first': first, 'last': last})}"
    return decode(await client.ask("GET", address, _STEPS_TIMEOUT_S, MAX_NBYTES))


async def ask_clocks(client: MonitorClient, url: str) -> Mapping[str, ClockOffset]:
    """Return the offsets of nodes' clocks from a daemon; errors as `Children.steps`."""
    address = f"{url.rstrip('/')}/v1/clocks"
    return decode_clocks(await client.ask("GET", address, _TIMEOUT_S, 1 << 24))


class Children:
    """Requests summaries and stacks from child daemons. `close` ends its connections."""

    def __init__(self, secret: bytes) -> None:
        self._client = MonitorClient(secret)

    async def summary(self, url: str, cursor: Cursor, budget: int) -> Summary:
        """Return the summary of the daemon at `url`.

        Args:
            url: of the daemon.
            cursor: where to continue.
            budget: finished operations to send of each rank, at most.

        Raises:
            MonitorUnreachable: it does not answer, or refuses, or does not know the job's secret.
            ProtocolViolation: its answer is not a summary.
        """
        asked = {"incarnation": cursor.incarnation, "since": cursor.since, "budget": budget}
        records = (
            {"records": 0}
            if cursor.records_since is None
            else {"records_since": cursor.records_since}
        )
        query = urlencode(asked | records)
        address = f"{url.rstrip('/')}/v1/summary?{query}"
        return decode(await self._client.ask("GET", address, _TIMEOUT_S, MAX_NBYTES))

    async def steps(self, url: str, first: int, last: int) -> Summary:
        """Return the records of some steps from the daemon at `url` and those below it.

        Raises:
            MonitorUnreachable: it does not answer, or refuses, or does not know the job's secret.
            ProtocolViolation: its answer is not a summary.
        """
        return await ask_steps(self._client, url, first, last)

    async def send_clocks(self, url: str, clocks: Mapping[str, ClockOffset]) -> None:
        """Send the offsets of nodes' clocks to the daemon at `url`.

        Raises:
            MonitorUnreachable: it does not answer, or refuses, or does not know the job's secret.
            ProtocolViolation: its answer is longer than a monitor's.
        """
        address = f"{url.rstrip('/')}/v1/clocks"
        await self._client.ask("POST", address, _TIMEOUT_S, 1 << 16, encode_clocks(clocks))

    async def stacks(self, url: str, rank: int) -> dict[str, Any]:
        """Return the stacks of a rank from the child that has it, or `{"error": reason}`."""
        address = f"{url.rstrip('/')}/v1/stacks/{rank}"
        try:
            return await self._client.ask_object(address, STACKS_TIMEOUT_S + _TIMEOUT_S)
        except (MonitorUnreachable, ProtocolViolation) as error:
            return {"error": str(error)}

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()
