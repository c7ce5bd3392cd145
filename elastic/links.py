"""Noticing a dead agent at once, instead of when its lease ends.

Each agent listens on a port and says its node's name to whoever connects. The leader keeps a connection to every other agent and every
other agent one to the leader: linear in nodes. When a process dies its kernel closes the connection; if the port then refuses (or another
name answers), the agent is certainly dead, and its lease can be revoked by whoever noticed. A host that merely does not answer
proves nothing: that case is left to the lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from elastic.errors import StoreUnavailable
from elastic.records import NodeRecord

log = logging.getLogger("keepstep")

_CONNECT_TIMEOUT_S = 2.0
_RETRY_S = 0.5


async def answer(node: str, host: str) -> asyncio.Server:
    """Listen on a free port of `host`, saying `node` to whoever connects, until closed."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(node.encode() + b"\n")
            await writer.drain()
            await reader.read()
        except ConnectionError:
            pass  # The peer went away, which is all that this connection is for.
        finally:
            writer.close()

    return await asyncio.start_server(greet, host, 0)


class Links:
    """Connections to other agents. `watch` sets whom to watch; `close` ends all of them."""

    def __init__(self, declare_dead: Callable[[NodeRecord], Awaitable[None]]) -> None:
        self._declare_dead = declare_dead
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def watch(self, peers: Iterable[NodeRecord]) -> None:
        """Watch exactly these agents."""
        wanted = {(peer.node, peer.lease): peer for peer in peers}
        for key in set(self._tasks) - set(wanted):
            self._tasks.pop(key).cancel()
        for key, peer in wanted.items():
            if key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._follow(peer))

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks.values())
        self.watch(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, peer: NodeRecord) -> None:
        while not await _is_dead(peer):  # noqa: ASYNC110 - a remote process is waited for, which sets no event here
            await asyncio.sleep(_RETRY_S)
        log.warning("the agent of node %s is dead", peer.node)
        try:
            await self._declare_dead(peer)
        except StoreUnavailable as error:
            log.warning("could not declare %s gone (%s); its lease will end by itself", peer.node, error)


async def _is_dead(peer: NodeRecord) -> bool:
    """Stay connected until the connection ends; then True if the agent is dead, False if that is unknown."""
    host, _, port = peer.agent.rpartition(":")
    for attempt in range(2):
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                name = await reader.readline()
            if name.strip() != peer.node.encode():
                return attempt > 0 or bool(name)
            await reader.read()
        except (OSError, TimeoutError):
            continue
        finally:
            writer.close()
    return False
