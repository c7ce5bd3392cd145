"""Takes part in the job for one torchrun agent, on an event loop.

`Participation` does so for any agent: lease, records, leadership, a snapshot server. This module
gives it torchrun's workers, and tells torchrun's calls from its own thread what comes of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.departure import Departure
from keepstep.elastic.agent.participation import Participation
from keepstep.elastic.agent.peer_connections import AgentListener
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.errors import ElasticError
from keepstep.elastic.rendezvous.records import Result
from keepstep.elastic.store.contract import Store
from keepstep.elastic.torchrun.rounds import (
    Closed,
    TimedOut,
    awaits_nodes,
    closed,
    result_of,
    timed_out,
)
from keepstep.elastic.torchrun.settings import Settings
from keepstep.elastic.torchrun.workers import COMMAND, Place, TorchrunWorkers, WorkerSocket
from keepstep.elastic.worker.launched_session import VARIABLE

_LOOK_S = 0.5
"""How often to see whether it is still for nodes that a round waits."""


class TorchrunNode:
    """One node of a torchrun job. Made by `open`; `leave` ends it.

    Attributes:
        name: the node's name.
        environment: variables that torchrun's workers are to have.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        listener: AgentListener,
        store_socket: StoreSocket,
        *,
        has_snapshots: bool,
    ) -> None:
        wake = asyncio.Event()
        self._entered = 0
        self.name = config.node
        self._config = config
        self._listener = listener
        self._store_socket = store_socket
        self._departure = Departure(wake.set)
        self._workers = TorchrunWorkers(config.node, config.workers, wake.set)
        path = config.run_directory / "workers.sock"
        self._socket = WorkerSocket(path, self._workers) if has_snapshots else None
        self.environment: Mapping[str, str] = {VARIABLE: str(path)} if has_snapshots else {}
        self._participation = Participation(
            config,
            store,
            agent_listener=listener,
            store_socket=store_socket,
            departure=self._departure,
            wake=wake,
            worker_group=self._workers,
        )
        self._running = asyncio.create_task(self._participation.run())

    @classmethod
    async def open(
        cls, settings: Settings, store: Store, node: str, host: str, directory: Path
    ) -> TorchrunNode:
        """Open the ports of a node and begin to take part.

        Args:
            settings: of the job.
            store: the coordinator; the caller closes it after `leave`.
            node: the node's name, unique in the job.
            host: where other nodes reach this one.
            directory: private, for sockets.

        Raises:
            UsageError: the node's name cannot be sent.
            OSError: there is no free port.
        """
        config = AgentConfig(
            job=settings.job,
            node=node,
            host=host,
            workers=settings.workers or 1,
            command=COMMAND,
            policy=settings.policy,
            environment={},
            run_directory=directory,
            digest=settings.digest,
            lease_ttl_s=settings.lease_ttl_s,
            grace_s=settings.grace_s,
            spares=0,
        )
        listener = await AgentListener.open(node, host, max_peers=settings.policy.max_nodes)
        return cls(
            config, store, listener, StoreSocket(host), has_snapshots=settings.workers is not None
        )

    async def enter(self) -> Place | Closed | TimedOut:
        """Take part in the next round; the workers of the last one have ended.

        Raises:
            UsageError: another job has the name; or the coordinator's keys cannot be read.
            StoreUnavailable: the coordinator is away for longer than the job waits.
            JobFailed: the snapshot server does not start.
            InvariantViolated: the job's keys break an invariant.
        """
        # Those of the next round may be waited for already, since the last ones have ended.
        self._workers.end(1, self._entered)
        limit_s = self._config.policy.quorum_timeout_s
        since_s = time.monotonic()
        while not self._running.done():
            place = self._workers.take_place()
            if place is not None:
                self._entered = place.generation
                return place
            view = self._participation.view
            if not awaits_nodes(view):
                since_s = time.monotonic()
            left_s = since_s + limit_s - time.monotonic()
            if left_s <= 0:
                return timed_out(view, limit_s)
            entered = asyncio.create_task(self._workers.entered.wait())
            try:
                await asyncio.wait(
                    {self._running, entered},
                    timeout=min(left_s, _LOOK_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                entered.cancel()
        reason = closed(self._participation.view, self.name)
        if reason is None:
            self._running.result()
            return Closed(f"node {self.name} has left the job")
        return reason

    async def reason_to_restart(self, generation: int) -> str:
        """Return why torchrun is to end the workers of a round and to ask for the next; "": no."""
        view, failure = self._participation.view, self._workers.failure
        is_done = self._running.done()
        is_current = self._workers.generation == generation
        if is_current and not self._workers.restart_is_due and not is_done:
            return ""
        if view.result is not None:
            has_succeeded = is_done and view.result.succeeded
            return "" if has_succeeded else f"the job has ended: {view.result.message}"
        if view.is_closing and view.closing is not None:
            return view.closing.reason
        if failure is not None:
            return failure.summary
        if is_done:
            return "this node takes no more part in the job"
        return "other nodes have gone on without this one, whose lease had ended"

    async def has_ended(self) -> bool:
        """Return whether the job has ended."""
        return self._participation.view.result is not None

    async def end_job(self, result: Result) -> None:
        """Have the leader end the job for all nodes."""
        if not self._running.done():
            self._workers.end(1)
            self._participation.end_job(result)
            await asyncio.wait({self._running}, timeout=2 * self._config.lease_ttl_s)

    async def finish(self, generation: int, error: BaseException | None) -> None:
        """End the job, once torchrun's agent has ended on this node for good.

        After success the job ends when the workers of all nodes have finished. If a generation
        follows that, in which this node would have to take part, it ends at once.

        Args:
            generation: the round in which the agent has ended.
            error: what has ended it; None: its workers have finished.
        """
        if error is None and self._may_finish(generation):
            self._workers.end(0)
            while not self._running.done() and self._may_finish(generation):
                await asyncio.wait({self._running}, timeout=_LOOK_S)
        await self.end_job(result_of(self.name, error))

    async def leave(self) -> None:
        """End the membership in good order, as far as others still need this node."""
        self._workers.end(1)
        if not self._running.done():
            self._departure.begin("torchrun's agent ends: handing over what this node holds")
            await asyncio.wait({self._running}, timeout=2 * self._config.grace_s)
            self._running.cancel()
        with suppress(asyncio.CancelledError, ElasticError):
            await self._running
        if self._socket is not None:
            await self._socket.close()
        await self._listener.close()
        self._store_socket.close()

    def _may_finish(self, generation: int) -> bool:
        return self._workers.generation == generation and not self._workers.is_draining
