"""The node agent: one per node, it joins the job, runs the node's workers and carries out what the generation document says.

A single event loop. Everything it knows is the membership's view, its workers' state and the snapshot server's holdings; `_reconcile`
compares them after every event and takes the next step, so the order in which events arrive does not matter.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.checkpoint.memory.messages import Persisted, PersistFailed, Protected
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.server.limits import RateLimits
from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.agent.peer_connections import AgentListener, PeerConnections
from keepstep.elastic.agent.snapshot_process import (
    ServerDied,
    SnapshotEvent,
    SnapshotProcess,
    stored_part,
)
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.errors import (
    InvariantViolated,
    JobFailed,
    LeaseLost,
    StoreUnavailable,
    UsageError,
)
from keepstep.elastic.rendezvous.actions import Publish
from keepstep.elastic.rendezvous.checkpoint_schedule import PartAttempt, next_part
from keepstep.elastic.rendezvous.decide import RendezvousPolicy, may_leave
from keepstep.elastic.rendezvous.intervals import failures_per_s
from keepstep.elastic.rendezvous.records import (
    Generation,
    NodePhase,
    NodeRecord,
    NodeReport,
)
from keepstep.elastic.store.contract import Store
from keepstep.elastic.worker import telemetry
from keepstep.elastic.worker.bootstrap import Command

log = logging.getLogger("keepstep")

# How far a node is matters to people only, unless something else is to be said: this many writes a second over all nodes.
_PROGRESS_WRITES_PER_S = 20


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What one agent runs, and how. Times in seconds."""

    job: str
    node: str
    host: str
    workers: int
    command: Command
    policy: RendezvousPolicy
    environment: Mapping[str, str]
    run_directory: Path
    digest: str
    domain: str = ""
    lease_ttl_s: float = 5.0
    drain_timeout_s: float = 60.0
    abort_timeout_s: float = 5.0
    grace_s: float = 30.0
    spares: int = 1
    limits: RateLimits = field(default_factory=RateLimits)
    records: bool = False
    """Whether workers record what they do, for `keepstep monitor`."""


class Agent:
    """Runs one node's part of a job. `run` returns when the job has ended or the node has left."""

    def __init__(self, config: AgentConfig, store: Store) -> None:
        self._config = config
        self._store = store
        self._wake = asyncio.Event()
        self._leaving_since_s: float | None = None
        self._listener = _open_listener(config.host)
        self._drained_generation = 0
        self._committed: SnapshotId | None = None
        self._stored = -1
        self._part_attempt: PartAttempt | None = None
        self._progress_due_s = 0.0
        self._member_until_s = float("-inf")

    def ask_to_leave(self, reason: str = "") -> None:
        """Begin a graceful departure (a preemption notice, Ctrl-C): hand over the state, then leave."""
        if self._leaving_since_s is None:
            log.warning(
                "%s", reason or "leaving: handing over what this node holds (again to quit at once)"
            )
            self._leaving_since_s = time.monotonic()
            self._wake.set()

    async def run(self) -> bool:
        """Take part in the job until it ends; True if it succeeded, False if this node left before.

        Raises:
            JobFailed: the job failed; the message names the first failing rank and why.
            UsageError, StoreUnavailable: the job could not be joined, or the coordinator is gone.
        """
        agent_listener = await AgentListener.open(self._config.node, self._config.host)
        try:
            while True:
                try:
                    return await self._take_part(agent_listener)
                except LeaseLost as lost:
                    log.error("%s; its workers are stopped, joining again", lost)
                except StoreUnavailable as gone:
                    # An outage of the coordinator ends training, but not the job: other nodes wait for it to end as well.
                    if (
                        time.monotonic()
                        > self._member_until_s + self._config.policy.quorum_timeout_s
                    ):
                        raise
                    log.error("%s; its workers are stopped, trying again", gone)
        finally:
            self._listener.close()
            agent_listener.close()

    async def _take_part(self, agent_listener: AgentListener) -> bool:
        """One membership, from lease to lease's end."""
        config = self._config
        self._drained_generation, self._committed, self._stored, self._part_attempt = (
            0,
            None,
            -1,
            None,
        )
        record = NodeRecord(
            node=config.node,
            host=config.host,
            nproc=config.workers,
            agent=f"{config.host}:{agent_listener.port}",
            server="",
            store_port=self._listener.getsockname()[1],
            lease=0,
            digest=config.digest,
            domain=config.domain,
        )
        membership = Membership(
            self._store,
            config.job,
            config.policy,
            record,
            config.lease_ttl_s,
            self._wake.set,
            self._publish,
        )
        self._membership = membership
        secret = await membership.join()
        self._member_until_s = float("inf")
        agent_listener.accept_reports(secret, membership.receive_report)
        connections = self._connections = PeerConnections(secret, membership.revoke)
        self._worker_group = WorkerGroup(
            config.command, config.workers, config.spares, config.environment, self._wake.set
        )
        try:
            self._snapshots = await SnapshotProcess.start(
                config.node,
                config.workers,
                config.run_directory,
                config.host,
                secret,
                self._on_snapshot_event,
                config.limits,
            )
            membership.update(server=self._snapshots.address)
            async with asyncio.TaskGroup() as group:
                work = group.create_task(membership.run())
                try:
                    return await self._work(connections, secret.hex(), work)
                finally:
                    work.cancel()
        except* LeaseLost as lost:
            raise lost.exceptions[0] from None
        except* (JobFailed, StoreUnavailable, UsageError, InvariantViolated) as failed:
            raise failed.exceptions[0] from None
        finally:
            self._member_until_s = time.monotonic()
            await self._worker_group.stop(0.0)
            await connections.close()
            if hasattr(self, "_snapshots"):
                await self._snapshots.close()
        raise AssertionError("unreachable: the task group returns or raises")

    async def _work(
        self, connections: PeerConnections, secret: str, membership_task: asyncio.Task[None]
    ) -> bool:
        config = self._config
        while True:
            self._wake.clear()
            if await self._reconcile(secret):
                result = self._membership.view.result
                await self._worker_group.stop(1.0 if result is None or result.succeeded else 0.0)
                # Leaving deletes the node's own key, which must not look like a lost lease.
                membership_task.cancel()
                await asyncio.wait([membership_task])
                await self._membership.leave()
                if result is not None and result.succeeded and config.records:
                    telemetry.remove_rings(config.job)
                if result is not None and not result.succeeded:
                    raise JobFailed(result.message)
                return result is not None
            connections.watch(self._peers())
            timeout_s = self._next_deadline_s()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _peers(self) -> list[NodeRecord]:
        """Whom this agent watches: the leader everyone, everyone else the leader."""
        view = self._membership.view
        if self._membership.leads:
            return [
                joined.record for node, joined in view.nodes.items() if node != self._config.node
            ]
        return [view.nodes[view.leader].record] if view.leader else []

    def _next_deadline_s(self) -> float | None:
        deadlines = [
            self._worker_group.drain_until_s,
            self._progress_due_s if self._worker_group.workers else None,
        ]
        if self._leaving_since_s is not None:
            deadlines.append(self._leaving_since_s + self._config.grace_s)
        present = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(present) - time.monotonic()) if present else None

    async def _reconcile(self, secret: str) -> bool:
        """Take every step that the present situation calls for; True when nothing is left to do but to leave."""
        membership, worker_group = self._membership, self._worker_group
        view = membership.view
        if view.result is not None:
            return True
        eviction = view.evictions.get(self._config.node)
        if eviction is not None and self._leaving_since_s is None:
            self.ask_to_leave(f"evicted: {eviction.reason}")
        if self._leaving_since_s is not None:
            membership.update(leaving=True)
            overdue = time.monotonic() >= self._leaving_since_s + self._config.grace_s
            if overdue or may_leave(self._config.policy, view, self._config.node):
                return True
        await self._follow_commits()
        if worker_group.generation == 0:
            worker_group.warm_up()
        generation = view.generation
        place = generation.member(self._config.node) if generation is not None else None
        if place is not None and place.server != self._snapshots.address:
            generation = None  # It was given to an agent of this name that is gone; the leader will find it lost.
        if generation is not None and generation.generation > worker_group.generation:
            await self._enter(generation, secret)
            # A request to store may have come with the generation.
            self._wake.set()
        elif generation is not None and generation.generation == worker_group.generation:
            for request in view.restarts_on(self._config.node):
                worker_group.restart(request.rank, request.reason)
                await membership.complete_restart_request(request)
            if view.is_closing or worker_group.failure is not None:
                abort = worker_group.failure is not None or (
                    view.closing is not None and view.closing.abort
                )
                await self._drain(generation.generation, abort)
            membership.update(times=worker_group.times(), restored_from=worker_group.restored_from)
        worker_group.start_spares()
        membership.update(
            warm=membership.record.warm or worker_group.warm,
            failure=worker_group.failure,
            finishing=worker_group.finishing,
            checkpoint_url=worker_group.checkpoint_url,
            checkpoint_every=worker_group.checkpoint_every,
            phase=self._phase(),
        )
        if membership.record.phase is NodePhase.DONE:
            # Reports end with the workers; the record is what remains.
            membership.update(sealed=self._snapshots.sealed, protected=self._snapshots.protected)
        if membership.has_unwritten_changes or time.monotonic() >= self._progress_due_s:
            self._progress_due_s = time.monotonic() + max(
                1.0, len(view.nodes) / _PROGRESS_WRITES_PER_S
            )
            membership.update(
                step=worker_group.step,
                memory_nbytes=self._snapshots.memory_nbytes,
                snapshot_every=worker_group.snapshot_every,
                snapshot_cost_s=worker_group.snapshot_cost_s,
            )
        return False

    def _phase(self) -> NodePhase:
        worker_group = self._worker_group
        if worker_group.generation == 0 or not worker_group.workers:
            return NodePhase.WAITING
        if worker_group.done and worker_group.failure is None:
            return NodePhase.DONE
        if self._drained_generation == worker_group.generation:
            return NodePhase.DRAINED
        return NodePhase.RUNNING if worker_group.running else NodePhase.STARTING

    async def _enter(self, generation: Generation, secret: str) -> None:
        """Put the node's workers into a generation, or end them if the node has no place in it."""
        worker_group, membership = self._worker_group, self._membership
        await self._snapshots.open_generation(generation)
        resume = generation.resume
        # Resuming from storage goes back behind whatever older generations left in memory.
        await self._commit(resume.snapshot if resume else SnapshotId(generation.generation, -1))
        if resume is not None:
            await self._snapshots.rebuild(resume)
        member = generation.member(self._config.node)
        if member is None:
            await worker_group.enter_as_spare(generation.generation)
            return
        leads_ranks = member.first_rank == 0
        used, descriptor = self._listener, None
        if leads_ranks:
            # The port that was announced serves one generation's torch store; the next generation gets another.
            self._listener = _open_listener(self._config.host)
            if self._config.command.kind == "program":
                used.close()  # A program serves its rendezvous itself.
            else:
                descriptor = used.fileno()
        await worker_group.enter(
            generation,
            member,
            descriptor,
            self._snapshots.local_address,
            secret,
            self._config.job,
            self._config.policy.max_restarts,
            failures_per_s(
                membership.view.history.recoveries, len(generation.members), time.time()
            ),
        )
        if leads_ranks:
            used.close()
        await self._snapshots.refresh()
        membership.update(
            store_port=self._listener.getsockname()[1],
            generation=generation.generation,
            phase=NodePhase.STARTING,
            failure=None,
            finishing=False,
            persisted=None,
            restored_from="",
            times={},
            sealed=self._snapshots.sealed,
            protected=self._snapshots.protected,
        )

    async def _drain(self, generation: int, abort: bool) -> None:
        """End the generation here; when nothing of it can write any more, say so with what is sealed."""
        if self._drained_generation == generation:
            return
        limit_s = self._config.abort_timeout_s if abort else self._config.drain_timeout_s
        if not await self._worker_group.drain(abort, limit_s):
            return
        if abort:
            # If nobody is lost, what is sealed will do.
            await self._snapshots.finish_protection()
        await self._snapshots.verify()
        self._drained_generation = generation
        self._membership.update(
            sealed=self._snapshots.sealed,
            protected=self._snapshots.protected,
            step=self._worker_group.step,
            phase=NodePhase.DRAINED,
        )

    async def _follow_commits(self) -> None:
        """Pass on what has been committed and stored, and write what is to be stored."""
        view = self._membership.view
        # A commit frees what older requests are to store: those begin first.
        attempt = next_part(
            view, self._snapshots.address, self._worker_group.generation, self._part_attempt
        )
        if attempt is not None:
            self._part_attempt = attempt
            await self._snapshots.persist(attempt)
        if view.snapshot is not None and view.snapshot.snapshot != self._committed:
            await self._commit(view.snapshot.snapshot)
        if view.checkpoint is not None and view.checkpoint.step > self._stored:
            self._stored = view.checkpoint.step
            await self._worker_group.broadcast({"type": "stored", "step": self._stored})

    async def _commit(self, snapshot: SnapshotId) -> None:
        self._committed = snapshot
        await self._snapshots.commit(snapshot)
        await self._worker_group.broadcast({"type": "committed", "step": snapshot.step})

    def _on_snapshot_event(self, event: SnapshotEvent) -> None:
        """Pass on what the snapshot server has protected or stored, or has failed to."""
        match event:
            case Protected():
                self._report()
            case Persisted() | PersistFailed():
                attempt = self._part_attempt
                # An earlier attempt may end after the next one has begun.
                if attempt is not None and event.attempt == attempt.revision:
                    self._membership.update(persisted=attempt.answer(stored_part(event)))
            case ServerDied():
                self._worker_group.fail("the snapshot server of this node died")
        self._wake.set()

    def _report(self) -> None:
        """Tell the leader what is protected here."""
        record = self._membership.record
        protected = self._snapshots.protected
        if self._drained_generation == record.generation:
            # From there on the leader goes by the record: others may still be waiting for this snapshot's commit.
            self._membership.update(sealed=self._snapshots.sealed, protected=protected)
            return
        report = NodeReport(
            record.node, record.lease, record.generation, self._worker_group.step, protected
        )
        self._membership.receive_report(report)
        if not self._membership.leads:
            self._connections.report(report)

    async def _publish(self, action: Publish) -> None:
        await self._snapshots.publish(action.request, action.parts)


def _open_listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen(1024)
    return listener
