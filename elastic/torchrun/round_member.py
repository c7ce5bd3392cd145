"""Takes part in the rounds of a torchrun job, over as many memberships as that takes.

The shell around `keepstep.elastic.torchrun.rounds`. Lease, records, leadership and the detection of
dead agents are those of `keepstep run` (`keepstep.elastic.agent`): this node has no workers of its
own, since torchrun runs them, and no snapshot server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.agent.peer_connections import AgentListener, PeerConnections
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.errors import LeaseLost
from keepstep.elastic.rendezvous.actions import Publish
from keepstep.elastic.rendezvous.records import NodePhase, NodeRecord, Result
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.store.contract import Store
from keepstep.elastic.store.outages import outlast_outage
from keepstep.elastic.torchrun.rounds import (
    Closed,
    Enter,
    TimedOut,
    Wait,
    awaits_nodes,
    changes_at_end,
    next_step,
    nodes_waiting,
)
from keepstep.elastic.torchrun.settings import Settings
from keepstep.transport import Identity
from keepstep.transport.addresses import host_and_port

log = logging.getLogger("keepstep")

_LEAVE_S = 3.0
"""How long a node tries to give up its lease; after that the lease ends by itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """This node's place in a round.

    Attributes:
        generation: the round's number.
        rank: of this node.
        size: number of nodes.
        store_host, store_port: where the round's torch store is served, by rank 0.
        listening: the socket at which this node serves it, which the owner closes; None: another
            node does.
    """

    generation: int
    rank: int
    size: int
    store_host: str
    store_port: int
    listening: socket.socket | None


class RoundMember:
    """One node of a torchrun job. Made by `open`; `leave` ends it.

    Args:
        settings: of the job.
        store: the coordinator; the caller closes it after `leave`.
        record: the node's first record.
        listener: where other agents reach this one.
        store_socket: the port that is announced for the next round's torch store.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        record: NodeRecord,
        listener: AgentListener,
        store_socket: StoreSocket,
    ) -> None:
        self._settings = settings
        self._store = store
        self._listener = listener
        self._store_socket = store_socket
        self._server = record.server
        self._changed = asyncio.Event()
        self._secret: bytes | None = None
        self._membership = self._new_membership(record)
        self._connections: PeerConnections | None = None
        self._running: asyncio.Task[None] | None = None
        self._reported_outage = ""

    @classmethod
    async def open(cls, settings: Settings, store: Store, node: str, host: str) -> RoundMember:
        """Open the ports of a node, which `enter` makes a member.

        Args:
            settings: of the job.
            store: the coordinator.
            node: the node's name, unique in the job.
            host: where other nodes reach this one.

        Raises:
            UsageError: the node's name cannot be sent.
            OSError: there is no free port.
        """
        listener = await AgentListener.open(node, host, max_peers=settings.policy.max_nodes)
        store_socket = StoreSocket(host)
        record = NodeRecord(
            node=node,
            host=host,
            nproc=1,
            agent=host_and_port(host, listener.port),
            # Names this process: another one of the node's name is not the same member.
            server=f"torchrun:{secrets.token_hex(8)}",
            store_port=store_socket.port,
            lease=0,
            digest=settings.digest,
            warm=True,
        )
        return cls(settings, store, record, listener, store_socket)

    async def enter(self) -> Place | Closed | TimedOut:
        """Take part in the next round; the workers of the last one have ended.

        Raises:
            UsageError: another job has the name; or the coordinator's keys cannot be read.
            StoreUnavailable: the coordinator is away for longer than the job waits.
            InvariantViolated: the job's keys break an invariant.
        """
        since_s = time.monotonic()
        limit_s = self._settings.policy.quorum_timeout_s
        while True:
            self._changed.clear()
            await self._be_member()
            membership = self._membership
            membership.update(**changes_at_end(membership.view, membership.record, time.time()))
            if not awaits_nodes(membership.view):
                since_s = time.monotonic()
            waited_s = time.monotonic() - since_s
            match next_step(membership.view, membership.record, waited_s, limit_s):
                case Enter() as step:
                    return self._enter(step)
                case Wait(at_most_s):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(at_most_s):
                            await self._changed.wait()
                case step:
                    return step

    def may_enter(self, generation: int) -> bool:
        """Return whether a generation that this node is to enter is still open."""
        return self.view.result is None and not self.nodes_waiting(generation)

    def reason_to_restart(self) -> str:
        """Return why `nodes_waiting` is above 0, for people."""
        view = self.view
        if view.result is not None:
            return f"the job has ended: {view.result.message}"
        if view.is_closing and view.closing is not None:
            return view.closing.reason
        return "other nodes have gone on without this one, whose lease had ended"

    async def begin_work(self) -> None:
        """Record that all nodes have entered the round; from now on others may be let in."""
        self._membership.update(phase=NodePhase.RUNNING)

    # Other threads than the event loop's call these, too: they read values that do not change.

    def nodes_waiting(self, generation: int) -> int:
        """See `keepstep.elastic.torchrun.rounds.nodes_waiting`; 1 when the lease has ended."""
        return nodes_waiting(self.view, generation) if self._is_member else 1

    @property
    def view(self) -> View:
        """The job's keys, as far as this node follows them."""
        return self._membership.view

    @property
    def node(self) -> str:
        """This node's name."""
        return self._membership.record.node

    async def end_job(self, result: Result) -> None:
        """Publish how the job has ended for all nodes, by whoever leads."""
        self._membership.update(ended=result)
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._settings.lease_ttl_s):
                while self.view.result is None and self._is_member:
                    self._changed.clear()
                    await self._changed.wait()

    async def leave(self) -> None:
        """End the membership, and close the ports. May be called twice."""
        if self._connections is not None:
            await self._connections.close()
            self._connections = None
        if self._running is not None and self._is_member:
            self._running.cancel()
            await asyncio.wait([self._running])
            try:
                async with asyncio.timeout(None if self.view.result else _LEAVE_S):
                    await self._membership.leave()
            except TimeoutError:
                log.warning("etcd does not answer; the lease of this node ends by itself")
        await self._listener.close()
        self._store_socket.close()

    @property
    def _is_member(self) -> bool:
        return self._running is not None and not self._running.done()

    def _enter(self, step: Enter) -> Place:
        generation = step.generation
        listening = None
        if step.rank == 0:
            # The port serves one round's torch store: with one that is used again, workers would
            # read the addresses of the round before.
            listening = self._store_socket.take()
        self._membership.update(
            generation=generation.generation,
            phase=NodePhase.STARTING,
            failure=None,
            store_port=self._store_socket.port,
        )
        return Place(
            generation=generation.generation,
            rank=step.rank,
            size=len(generation.members),
            store_host=generation.store_host,
            store_port=generation.store_port,
            listening=listening,
        )

    async def _be_member(self) -> None:
        """Join, at first and again after the lease has ended."""
        if self._is_member:
            return
        if self._running is not None:
            try:
                await self._running
            except LeaseLost as lost:
                log.warning("%s; joining again", lost)
            if self._membership.view.result is not None:
                return
            former = self._membership
            self._membership = self._new_membership(
                replace(former.record, phase=NodePhase.DRAINED), former.held
            )
        self._secret = await outlast_outage(
            self._membership.join, self._settings.policy.quorum_timeout_s
        )
        await self._listener.admit(self._secret, self._membership.receive_report)
        # Joining a job that has begun again meanwhile clears both.
        self._membership.update(warm=True, server=self._server)
        if self._connections is not None:
            await self._connections.close()
        self._connections = PeerConnections(
            Identity(self.node, self._secret), self._membership.revoke
        )
        self._running = asyncio.create_task(self._membership.run())
        self._running.add_done_callback(self._note_end)
        self._on_change()

    def _note_end(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled():
            # Taken here: `enter` raises it, but a node that leaves does not ask for it.
            running.exception()
        self._changed.set()

    def _new_membership(self, record: NodeRecord, held: View | None = None) -> Membership:
        return Membership(
            self._store,
            self._settings.job,
            self._settings.policy,
            record,
            self._settings.lease_ttl_s,
            self._on_change,
            _publish_nothing,
            self._secret,
            held=held,
        )

    def _on_change(self) -> None:
        self._changed.set()
        if self._connections is not None:
            self._connections.watch(self._membership.watched_peers)
        outage = self._membership.outage
        if outage and not self._reported_outage:
            log.warning("%s; training goes on, but no loss is noticed until it answers", outage)
        self._reported_outage = outage


async def _publish_nothing(action: Publish) -> None:
    raise AssertionError(f"a job of torchrun stores no checkpoints, {action}")
