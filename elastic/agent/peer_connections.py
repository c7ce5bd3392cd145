"""Connections between agents: noticing a dead agent at once, and telling the leader what was sealed.

Each agent listens on a port and says its node's name and a nonce to whoever connects. The leader keeps a connection to every other agent
and every other agent one to the leader: linear in nodes. When a process dies its kernel closes the connection; if the port then refuses
(or another name answers), the agent is certainly dead, and its lease can be revoked by whoever noticed. A host that merely does not
answer proves nothing: that case is left to the lease.

What a node has sealed changes at every step and matters to the leader only, so it goes over these connections and not through the
coordinator, to which every write costs a majority's disks and an event to every agent. Whoever reports proves first that it knows the
job's secret. The newest report is sent again on every new connection: a new leader hears it all.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable

from keepstep.elastic.errors import StoreUnavailable, UsageError
from keepstep.elastic.rendezvous.records import NodeRecord, NodeReport

log = logging.getLogger("keepstep")

_CONNECT_TIMEOUT_S = 2.0
_RETRY_S = 0.5
_LINE_NBYTES = 2**20


class AgentListener:
    """Where an agent is reached by others. Made by `open`; `close` ends it.

    `accept_reports` sets whose reports are heard: until then, and without the secret, they are refused.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._secret: bytes | None = None
        self._on_report: Callable[[NodeReport], None] = lambda _: None
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, node: str, host: str) -> AgentListener:
        """Listen on a free port of `host`."""
        self = cls(node)
        self._server = await asyncio.start_server(
            self._serve_connection, host, 0, limit=_LINE_NBYTES
        )
        return self

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def accept_reports(self, secret: bytes, on_report: Callable[[NodeReport], None]) -> None:
        """Hear reports of those who know the secret."""
        self._secret, self._on_report = secret, on_report

    def close(self) -> None:
        """Refuse newcomers."""
        if self._server is not None:
            self._server.close()

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonce = secrets.token_hex(32)
        try:
            writer.write(f"{self._node} {nonce}\n".encode())
            await writer.drain()
            proof = await reader.readline()
            if self._secret is None or not hmac.compare_digest(
                proof.strip(), _prove(self._secret, nonce)
            ):
                # It may stay connected, for that is how a watcher without reports notices this agent's death.
                await reader.read()
                return
            while line := await reader.readline():
                self._on_report(NodeReport.decode(line))
        except (ConnectionError, ValueError, UsageError) as error:
            log.debug("a link to this agent ended: %s", error)
        finally:
            writer.close()


class PeerConnections:
    """Connections to other agents. `watch` sets whom to watch, `report` what they are told; `close` ends all of them."""

    def __init__(
        self, secret: bytes, declare_dead: Callable[[NodeRecord], Awaitable[None]]
    ) -> None:
        self._secret = secret
        self._declare_dead = declare_dead
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._writers: dict[tuple[str, int], asyncio.StreamWriter] = {}
        self._report: bytes | None = None

    def watch(self, peers: Iterable[NodeRecord]) -> None:
        """Watch exactly these agents."""
        wanted = {(peer.node, peer.lease): peer for peer in peers}
        for key in set(self._tasks) - set(wanted):
            self._tasks.pop(key).cancel()
        for key, peer in wanted.items():
            if key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._watch_until_dead(key, peer))

    def report(self, report: NodeReport) -> None:
        """Tell those who are watched; those who cannot be reached receive it when they can."""
        self._report = report.encode() + b"\n"
        for writer in self._writers.values():
            writer.write(self._report)

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks.values())
        self.watch(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_until_dead(self, key: tuple[str, int], peer: NodeRecord) -> None:
        while not await self._is_dead(key, peer):  # noqa: ASYNC110 - a remote process is waited for, which sets no event here
            await asyncio.sleep(_RETRY_S)
        log.warning("the agent of node %s is dead", peer.node)
        try:
            await self._declare_dead(peer)
        except StoreUnavailable as error:
            log.warning(
                "could not declare %s gone (%s); its lease will end by itself", peer.node, error
            )

    async def _is_dead(self, key: tuple[str, int], peer: NodeRecord) -> bool:
        """Stay connected until the connection ends; then True if the agent is dead, False if that is unknown."""
        for _ in range(2):
            try:
                greeting = await _connect(peer)
            except ConnectionRefusedError:
                return True
            except (OSError, TimeoutError):
                return False
            name, nonce, reader, writer = greeting
            try:
                if name != peer.node:
                    return bool(
                        name
                    )  # Whoever says nothing may be that agent, too busy to greet in time.
                writer.write(_prove(self._secret, nonce) + b"\n" + (self._report or b""))
                self._writers[key] = writer
                await reader.read()
            except OSError:
                continue
            finally:
                self._writers.pop(key, None)
                writer.close()
        return False


async def probe(peer: NodeRecord) -> bool | None:
    """Return whether an agent lives: True if it answers by its name, False if its process is certainly gone, None if unknown."""
    try:
        name, _, _, writer = await _connect(peer)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return None
    writer.close()
    return name == peer.node if name else None


async def _connect(
    peer: NodeRecord,
) -> tuple[str, str, asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to where an agent should be; return the name and nonce that it says, empty if it says nothing in time."""
    host, _, port = peer.agent.rpartition(":")
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, int(port))
    line = b""
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            line = await reader.readline()
    except (OSError, ValueError, TimeoutError):
        pass  # Whoever this is, it is no agent that greets.
    except BaseException:
        writer.close()
        raise
    name, _, nonce = line.decode(errors="replace").strip().partition(" ")
    return name, nonce, reader, writer


def _prove(secret: bytes, nonce: str) -> bytes:
    return hmac.new(secret, b"link" + nonce.encode(), hashlib.sha256).hexdigest().encode()
