"""Tests what a client of monitors answers without asking one."""

import asyncio

import pytest

from keepstep.monitor.errors import MonitorUnreachable
from keepstep.monitor.tree.monitor_client import MonitorClient


@pytest.mark.parametrize(
    "address", ["http://[::1/v1/clocks", "node-1:8600/v1/clocks", "/v1/clocks"]
)
def test_address_that_is_none_of_a_monitor_is_unreachable(address: str) -> None:
    """Such a line in a file of children ended every round of clock offsets, for all children."""

    async def check() -> None:
        client = MonitorClient(b"secret")
        try:
            with pytest.raises(MonitorUnreachable, match="http://HOST:PORT"):
                await client.ask("POST", address, 5.0, 1 << 16)
        finally:
            await client.close()

    asyncio.run(check())
