"""Keeps a snapshot server running on this node: starts it, notices its death, replaces it.

A server may also be the one that the node's last agent has left, and be left to the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.snapshot_process import (
    ServerDied,
    ServerGone,
    SnapshotEvent,
    SnapshotProcess,
)
from keepstep.elastic.agent.state_directory import StateDirectory
from keepstep.elastic.errors import JobFailed
from keepstep.private_files import NotPrivate

log = logging.getLogger("keepstep")

_CHECK_S = 5.0


class ServerSupervisor:
    """One node's snapshot server, and the next one when it dies.

    Args:
        config: of this node's agent.
        on_event: called with what the servers report.
        on_loss: called when a server is found dead.

    Attributes:
        directory: of the server that was started last; None without one.
        has_died: whether the server is to be replaced, which its owner does once nothing writes
            to it.
    """

    def __init__(
        self,
        config: AgentConfig,
        on_event: Callable[[SnapshotEvent], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._config = config
        self._on_event = on_event
        self._on_loss = on_loss
        self._server: SnapshotProcess | None = None
        self.directory: StateDirectory | None = None
        self._secret = b""
        self.has_died = False

    @property
    def has_server(self) -> bool:
        """Whether a server was started, or found."""
        return self._server is not None

    @property
    def server(self) -> SnapshotProcess:
        """The server that was started last."""
        assert self._server is not None, "the snapshot server is started before it is used"
        return self._server

    async def start(self, secret: bytes) -> None:
        """Start a server for the run of the job that has this secret.

        Raises:
            JobFailed: it does not start.
        """
        config = self._config
        self._secret = secret
        try:
            self.directory = StateDirectory.create()
        except (NotPrivate, OSError) as error:
            raise JobFailed(f"no directory for the snapshot server: {error}") from error
        self._server = await SnapshotProcess.start(
            config.node,
            config.workers,
            self.directory.path,
            config.host,
            secret,
            self._receive,
            config.limits,
            config.keeping.keep_s,
        )

    async def attach(self, directory: StateDirectory, secret: bytes) -> None:
        """Go on with a server that another agent has left.

        Raises:
            ServerGone: it has ended, or does not answer.
        """
        self._secret, self.directory = secret, directory
        self._server = await SnapshotProcess.attach(
            self._config.node, self._config.workers, directory.path, secret, self._receive
        )

    async def replace(self) -> None:
        """Start a server after one that died; what it held is lost on this node.

        Raises:
            JobFailed: it does not start.
        """
        log.error(
            "the snapshot server of node %s died; it is replaced, and its snapshots are rebuilt "
            "from other nodes or storage",
            self._config.node,
        )
        # It stays the server that others find, and refuses them, until there is a new one.
        await self.server.close()
        self._remove_directory()
        self.has_died = False
        await self.start(self._secret)

    async def watch(self) -> None:
        """Ask now and then whether the server answers, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            asked = self.server
            try:
                await asked.refresh()
            except ServerGone:
                # It may have been replaced meanwhile, or its replacement may be starting.
                if asked is self._server and not asked.is_closed:
                    self.record_death()

    def record_death(self) -> None:
        """Note that the server is to be replaced."""
        self.has_died = True
        self._on_loss()

    async def close(self, *, keep: bool = False) -> None:
        """End the server, if there is one, and free what it holds; or leave it to the next one."""
        server, self._server = self._server, None
        if server is not None:
            await server.close(keep=keep)
        self._remove_directory(keep=keep and server is not None)

    def _remove_directory(self, *, keep: bool = False) -> None:
        directory, self.directory = self.directory, None
        if directory is not None and keep:
            directory.release()
        elif directory is not None:
            directory.remove()

    def _receive(self, event: SnapshotEvent) -> None:
        if isinstance(event, ServerDied):
            self.has_died = True
        self._on_event(event)
