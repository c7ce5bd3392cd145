"""Carries out the generation document on one node, over as many memberships as that takes.

A single event loop. All that it knows is the membership's view, the state of its workers and what
the snapshot server holds; `_reconcile` compares them after every event and takes the next steps, so
the order in which events arrive does not matter.

A membership that is lost costs no state: the workers stop, the snapshot server keeps what they have
sealed, and the node's next record lists it. A snapshot server that dies is replaced,
and the node takes part without what it held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.memory.messages import (
    AlreadyStored,
    Persisted,
    PersistFailed,
    Protected,
    RestoreChecked,
)
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.elastic.agent.assignments import JobContext, assignments_of
from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.departure import Departure
from keepstep.elastic.agent.fork_server_process import ForkServerProcess
from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.agent.peer_connections import AgentListener, Peer, PeerConnections
from keepstep.elastic.agent.server_supervisor import ServerSupervisor
from keepstep.elastic.agent.snapshot_process import (
    ServerDied,
    ServerGone,
    SnapshotEvent,
    SnapshotProcess,
    stored_part,
)
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.errors import (
    InvariantViolated,
    JobFailed,
    LeaseLost,
    StoreUnavailable,
    UsageError,
)
from keepstep.elastic.rendezvous.actions import Publish
from keepstep.elastic.rendezvous.checkpoint_schedule import PartAttempt, is_over, next_part
from keepstep.elastic.rendezvous.commits import next_commit
from keepstep.elastic.rendezvous.decide import may_leave
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    Generation,
    NodePhase,
    NodeRecord,
    NodeReport,
    RestoreComparison,
    Result,
)
from keepstep.elastic.store.contract import Store
from keepstep.elastic.worker import telemetry
from keepstep.elastic.worker.messages import (
    AbortOrdered,
    Assignment,
    CommandKind,
    SnapshotCommitted,
)
from keepstep.transport import Identity

log = logging.getLogger("keepstep")

_PROGRESS_WRITES_PER_S = 20
"""How often all nodes together write how far they are, while nothing else is to be written.

Only people read that."""

# The first of these that ended a membership is what the user should know: a broken invariant is
# never hidden, and a lost lease explains everything else.
_CAUSES = (
    InvariantViolated,
    LeaseLost,
    JobFailed,
    UsageError,
    StoreUnavailable,
    SnapshotUnavailable,
)


class Participation:
    """This node's part in the job. Used once: `run`.

    Args:
        config: what runs here, and how.
        store: the coordinator.
        agent_listener: where other agents reach this one.
        store_socket: the port that is announced for the next generation's torch store.
        departure: whether this node is to leave.
        wake: set when something has changed.
        fork_server: what forks the workers; None: each is started as a program.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        *,
        agent_listener: AgentListener,
        store_socket: StoreSocket,
        departure: Departure,
        wake: asyncio.Event,
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self._config = config
        self._store = store
        self._agent_listener = agent_listener
        self._store_socket = store_socket
        self._departure = departure
        self._wake = wake
        self._secret: bytes | None = None
        self._membership = self._new_membership(
            NodeRecord(
                node=config.node,
                host=config.host,
                nproc=config.workers,
                agent=f"{config.host}:{agent_listener.port}",
                server="",
                store_port=store_socket.port,
                lease=0,
                digest=config.digest,
                domain=config.domain,
            )
        )
        self._worker_group = WorkerGroup(
            config.command,
            config.workers,
            config.spares,
            config.environment,
            wake.set,
            fork_server,
        )
        self._supervisor = ServerSupervisor(config, self._on_snapshot_event, wake.set)
        self._connections: PeerConnections  # Set before anything uses it.
        self._drained_generation = 0
        self._ordered_generation = 0
        self._paused_generation = 0
        self._committed: SnapshotId | None = None
        self._announced: CommitAnnouncement | None = None
        self._part_attempt: PartAttempt | None = None
        self._progress_due_s = 0.0

    async def run(self) -> bool:
        """Take part until the job ends; return False if this node left before.

        Raises:
            InvariantViolated: the job's keys break an invariant; see its message.
            JobFailed, UsageError, StoreUnavailable: as `Agent.run`.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._supervisor.close)
            stack.push_async_callback(self._worker_group.stop, 0.0)
            member_until_s = float("-inf")
            while True:
                try:
                    await self._join()
                    return await self._take_part()
                except LeaseLost as lost:
                    result = self._membership.view.result
                    if result is not None:
                        # To join again would begin the job anew.
                        return self._end_with(result)
                    log.error("%s; its workers stop, joining again", lost)
                    member_until_s = time.monotonic()
                    await self._end_work()
                except StoreUnavailable as unavailable:
                    # Other nodes wait for the end of an outage as well.
                    if time.monotonic() > member_until_s + self._config.policy.quorum_timeout_s:
                        raise
                    if self._is_overdue:
                        log.warning("left without joining again: %s", unavailable)
                        return False
                    log.error("%s; trying again", unavailable)
        raise AssertionError("unreachable: the stack suppresses nothing")

    def _new_membership(self, record: NodeRecord) -> Membership:
        config = self._config
        return Membership(
            self._store,
            config.job,
            config.policy,
            record,
            config.lease_ttl_s,
            self._wake.set,
            self._publish,
            self._secret,
            self._announce,
        )

    async def _join(self) -> None:
        """Become a member, with a snapshot server of the job that answers."""
        secret = await self._membership.join()
        if secret != self._secret:
            # Whatever was held belongs to a job that is over.
            await self._supervisor.close()
            await self._worker_group.stop(0.0)
            self._worker_group.forget()
            self._secret = secret
            self._drained_generation = self._ordered_generation = self._paused_generation = 0
            self._announced = None
            await self._start_server()
        if self._membership.record.phase is NodePhase.DRAINED:
            # The generation that is open counts on this node, and is over for it.
            self._drained_generation = self._membership.record.generation
        await self._agent_listener.admit(
            secret, self._membership.receive_report, self._receive_announcement
        )

    async def _take_part(self) -> bool:
        """Work as a member until the job ends or this node leaves.

        Raises:
            LeaseLost: the node was declared gone.
        """
        assert self._secret is not None
        self._connections = PeerConnections(
            Identity(self._config.node, self._secret), self._membership.revoke
        )
        try:
            async with asyncio.TaskGroup() as group:
                membership_task = group.create_task(self._membership.run())
                server_task = group.create_task(self._supervisor.watch())
                try:
                    return await self._work(membership_task)
                finally:
                    membership_task.cancel()
                    server_task.cancel()
        except BaseExceptionGroup as errors:
            raise _cause_of(errors) from None
        finally:
            await self._connections.close()
        raise AssertionError("unreachable: the task group returns or raises")

    async def _end_work(self) -> None:
        """Stop the workers once the membership is lost, and keep what they have sealed."""
        group = self._worker_group
        while not await self._drain_at_once():
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.abort_timeout_s):
                    await self._wake.wait()
        self._drained_generation = group.generation
        try:
            await self._snapshots.verify()
        except ServerGone:
            await self._replace_server()
        self._membership.update(
            phase=self._phase(),
            sealed=self._snapshots.sealed,
            protected=self._snapshots.protected,
            committed=self._told,
            step=group.step,
        )
        self._membership = self._new_membership(self._membership.record)

    async def _start_server(self) -> None:
        assert self._secret is not None
        await self._supervisor.start(self._secret)
        self._adopt_server()

    async def _replace_server(self) -> None:
        await self._supervisor.replace()
        self._adopt_server()
        self._membership.update(sealed=(), protected=(), persisted=None)

    def _adopt_server(self) -> None:
        """Announce a new server, to which nothing has been passed on yet."""
        self._committed, self._part_attempt = None, None
        self._membership.update(server=self._snapshots.address)

    async def _mend_server(self) -> bool:
        """Replace a snapshot server that died; False if workers of its generation still drain."""
        group = self._worker_group
        if not await self._drain_at_once():
            return False
        self._drained_generation = group.generation
        await self._replace_server()
        return True

    @property
    def _snapshots(self) -> SnapshotProcess:
        return self._supervisor.server

    async def _work(self, membership_task: asyncio.Task[None]) -> bool:
        while True:
            self._wake.clear()
            try:
                is_leaving = await self._reconcile()
            except ServerGone:
                self._supervisor.record_death()
                continue
            if is_leaving:
                return await self._leave(membership_task)
            self._connections.watch(self._peers())
            try:
                async with asyncio.timeout(self._next_deadline_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _leave(self, membership_task: asyncio.Task[None]) -> bool:
        """Stop the workers, give up the lease, and return whether the job has ended."""
        result = self._membership.view.result
        has_failed = result is not None and not result.succeeded
        await self._worker_group.stop(0.0 if has_failed else 1.0)
        # Leaving deletes the node's own key, which must not look like a lost lease.
        membership_task.cancel()
        await asyncio.wait([membership_task])
        await self._membership.leave()
        return False if result is None else self._end_with(result)

    def _end_with(self, result: Result) -> bool:
        """Return True for a job that has succeeded.

        Raises:
            JobFailed: it has not.
        """
        if not result.succeeded:
            raise JobFailed(result.message)
        if self._config.is_recorded:
            telemetry.remove_rings(self._config.job)
        return True

    def _peers(self) -> list[Peer]:
        """Return whom this agent watches: the leader watches everyone, everyone the leader."""
        view = self._membership.view
        if self._membership.leads:
            return [
                joined.record for node, joined in view.nodes.items() if node != self._config.node
            ]
        leader = view.leadership
        return [leader] if leader is not None and leader.node != self._config.node else []

    def _next_deadline_s(self) -> float | None:
        """Return in how many seconds to look again although nothing changes; None: never."""
        deadlines = [
            self._worker_group.drain_until_s,
            self._worker_group.entry_until_s,
            self._progress_due_s if self._worker_group.workers else None,
            self._departure_deadline_s,
        ]
        present = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(present) - time.monotonic()) if present else None

    @property
    def _departure_deadline_s(self) -> float | None:
        since_s = self._departure.since_s
        return None if since_s is None else since_s + self._config.grace_s

    @property
    def _is_overdue(self) -> bool:
        """Whether the time in which this node may leave in good order is over."""
        deadline_s = self._departure_deadline_s
        return deadline_s is not None and time.monotonic() >= deadline_s

    async def _reconcile(self) -> bool:
        """Take every step that the situation calls for; return whether to leave now."""
        if self._membership.view.result is not None or self._is_ready_to_leave():
            return True
        if self._supervisor.has_died and not await self._mend_server():
            return False
        await self._follow_commits()
        if not self._worker_group.workers:
            self._worker_group.warm_up()
        await self._follow_generation()
        self._worker_group.start_spares()
        self._update_record()
        return False

    def _is_ready_to_leave(self) -> bool:
        view = self._membership.view
        eviction = view.evictions.get(self._config.node)
        if eviction is not None:
            self._departure.begin(f"evicted: {eviction.reason}")
        if self._departure.since_s is None:
            return False
        self._membership.update(leaving=True)
        return self._is_overdue or may_leave(view, self._config.node)

    async def _follow_generation(self) -> None:
        """Enter a new generation, or end the one that is closing."""
        membership, worker_group = self._membership, self._worker_group
        view = membership.view
        generation = view.generation
        if generation is None or generation.generation < self._entered_generation:
            return
        place = generation.member(self._config.node)
        if place is not None and place.server != self._snapshots.address:
            # The place was given to an agent of this name that is gone; the leader will find it
            # lost.
            return
        if generation.generation > self._entered_generation:
            await self._enter(generation)
            # A request to store may have come with the generation.
            self._wake.set()
            return
        # Not before the leader has closed the generation for it: peers may report the connections
        # that break sooner than the request is seen, and would be taken for the cause.
        for request in view.restarts_on(self._config.node) if view.is_closing else ():
            worker_group.restart(request.rank, request.reason)
            await membership.complete_restart_request(request)
        worker_group.check_entry()
        has_failed = worker_group.failure is not None
        if view.is_closing or has_failed:
            is_aborted = view.closing is not None and view.closing.abort
            await self._drain(generation.generation, abort=has_failed or is_aborted)
            await self._pause_workers(generation.generation)
        membership.update(
            times=worker_group.times(),
            restored_from=worker_group.restored_from,
            loaded=worker_group.loaded,
            replica_comparison=worker_group.replica_comparison,
        )

    def _update_record(self) -> None:
        """Bring the node's record up to date."""
        membership, worker_group = self._membership, self._worker_group
        membership.update(
            # Members that have drained go on with the workers that they have.
            warm=worker_group.warm or (membership.record.warm and bool(worker_group.workers)),
            failure=worker_group.failure,
            finishing=worker_group.finishing,
            checkpoint_url=worker_group.checkpoint_url,
            checkpoint_every=worker_group.checkpoint_every,
            checkpoint_compression=worker_group.checkpoint_compression,
            rank_multiple=worker_group.rank_multiple,
            max_ranks=worker_group.max_ranks,
            fitting_ranks=worker_group.fitting_ranks,
            phase=self._phase(),
        )
        if membership.record.phase is NodePhase.DONE:
            # Reports end with the workers; the record is what remains.
            membership.update(
                sealed=self._snapshots.sealed,
                protected=self._snapshots.protected,
                committed=self._told,
            )
        if membership.has_unwritten_changes or time.monotonic() >= self._progress_due_s:
            generation = membership.view.generation
            nodes = len(generation.members) if generation is not None else 1
            pause_s = max(1.0, nodes / _PROGRESS_WRITES_PER_S)
            self._progress_due_s = time.monotonic() + pause_s
            membership.update(
                step=worker_group.step,
                memory_nbytes=self._snapshots.memory_nbytes,
                snapshot_every=worker_group.snapshot_every,
                snapshot_cost_s=worker_group.snapshot_cost_s,
            )

    @property
    def _entered_generation(self) -> int:
        """The newest generation that this node has entered, or that is over for it."""
        return max(self._worker_group.generation, self._drained_generation)

    @property
    def _ended_generation(self) -> int:
        """The newest generation of which no announcement is believed here any more."""
        record = self._membership.record
        done = record.generation if record.phase is NodePhase.DONE else 0
        return max(self._drained_generation, record.fenced, done)

    @property
    def _told(self) -> SnapshotId | None:
        """The newest snapshot of the generation that is known here to be committed."""
        known = self._committed
        is_own = known is not None and known.generation == self._worker_group.generation
        return known if known is not None and is_own and known.step >= 0 else None

    def _phase(self) -> NodePhase:
        worker_group = self._worker_group
        if self._drained_generation > worker_group.generation:
            return NodePhase.DRAINED
        if worker_group.generation == 0 or not worker_group.workers:
            is_paused = (
                worker_group.generation and self._paused_generation == worker_group.generation
            )
            return NodePhase.DRAINED if is_paused else NodePhase.WAITING
        if worker_group.done and worker_group.failure is None:
            return NodePhase.DONE
        if self._drained_generation == worker_group.generation:
            return NodePhase.DRAINED
        return NodePhase.RUNNING if worker_group.running else NodePhase.STARTING

    async def _enter(self, generation: Generation) -> None:
        """Put the workers into a generation, or end them if the node has no place in it."""
        membership = self._membership
        await self._snapshots.open_generation(generation)
        resume = generation.resume
        # To resume from storage goes back behind whatever older generations left in memory.
        await self._commit(resume.snapshot if resume else SnapshotId(generation.generation, -1))
        if resume is not None:
            await self._snapshots.rebuild(resume)
        member = generation.member(self._config.node)
        if member is None:
            await self._worker_group.enter_as_spare(generation.generation)
            return
        context = JobContext(
            job=self._config.job,
            secret=self._snapshots.secret,
            server=self._snapshots.local_address,
            max_restarts=self._config.policy.max_restarts,
        )
        assignments = assignments_of(generation, member, context)
        if member.first_rank == 0:
            await self._enter_and_serve_store(assignments)
        else:
            await self._worker_group.enter(assignments)
        await self._snapshots.refresh()
        membership.update(
            store_port=self._store_socket.port,
            generation=generation.generation,
            phase=NodePhase.STARTING,
            failure=None,
            finishing=False,
            persisted=None,
            restored_from="",
            loaded=None,
            restore_comparison=None,
            replica_comparison=None,
            times={},
            sealed=self._snapshots.sealed,
            protected=self._snapshots.protected,
            committed=None,
        )

    async def _enter_and_serve_store(self, assignments: tuple[Assignment, ...]) -> None:
        """Enter as the node of rank 0, at whose announced port the generation meets."""
        # The port serves one generation's torch store; the next generation gets another.
        with self._store_socket.take() as listening:
            if self._config.command.kind is CommandKind.PROGRAM:
                listening.close()  # A program serves its rendezvous itself.
                await self._worker_group.enter(assignments)
            else:
                await self._worker_group.enter(assignments, listening.fileno())

    async def _drain(self, generation: int, *, abort: bool) -> None:
        """End the generation here; once no worker can write, record what is sealed."""
        if self._drained_generation == generation:
            return
        if abort and self._worker_group.awaits_abort_order:
            await self._prepare_abort(generation)
        limit_s = self._config.abort_timeout_s if abort else self._config.drain_timeout_s
        if not await self._worker_group.drain(abort=abort, limit_s=limit_s):
            return
        if abort:
            # If no node is lost, what is sealed suffices.
            await self._snapshots.finish_protection()
        await self._snapshots.verify()
        self._drained_generation = generation
        self._membership.update(
            sealed=self._snapshots.sealed,
            protected=self._snapshots.protected,
            committed=self._told,
            step=self._worker_group.step,
            phase=NodePhase.DRAINED,
        )

    async def _pause_workers(self, generation: int) -> None:
        """End the workers of a job that is paused, once they have drained; memory stays."""
        group = self._worker_group
        is_over = self._drained_generation == generation and not group.done
        if self._membership.view.pause is not None and is_over and group.workers:
            self._paused_generation = generation
            await group.end_drained()

    async def _drain_at_once(self) -> bool:
        """Drain by abort without the leader's order; return whether no worker can write any more.

        For a node that is no member any more, after whose loss nothing uncommitted is used, or
        whose snapshot server has died with all that was sealed here.
        """
        group = self._worker_group
        has_drained = await group.drain(abort=True, limit_s=self._config.abort_timeout_s)
        generation = group.generation
        if not has_drained and group.awaits_abort_order and self._ordered_generation != generation:
            self._ordered_generation = generation
            await group.broadcast(AbortOrdered(generation=generation))
        return has_drained

    async def _prepare_abort(self, generation: int) -> None:
        """Have nothing more sealed, tell the leader, and pass on its order to abort."""
        membership = self._membership
        if membership.record.fenced != generation:
            await self._snapshots.fence(generation)
            membership.update(fenced=generation, committed=self._told)
        order = membership.view.abort_order
        if order is not None and self._ordered_generation != order.generation == generation:
            self._ordered_generation = generation
            await self._worker_group.broadcast(AbortOrdered(generation=generation))

    async def _follow_commits(self) -> None:
        """Pass on what has been committed and stored, and begin to write what is to be stored."""
        view = self._membership.view
        # A commit frees what older requests are to store: those begin first.
        attempt = next_part(
            view, self._snapshots.address, self._entered_generation, self._part_attempt
        )
        if attempt is not None:
            self._part_attempt = attempt
            await self._snapshots.persist(attempt)
        elif self._part_attempt is not None and is_over(view, self._part_attempt):
            ended, self._part_attempt = self._part_attempt, None
            await self._snapshots.end_persist(ended)
        newer = next_commit(
            view, self._entered_generation, self._committed, self._announced, self._ended_generation
        )
        if newer is not None:
            await self._commit(newer)
        # Looked at whenever a worker has joined, too: it waits for the last step to be stored.
        stored = view.checkpoint
        await self._worker_group.tell_stored(
            stored.step if stored else -1, stored.generation if stored else 0
        )

    async def _commit(self, snapshot: SnapshotId) -> None:
        self._committed = snapshot
        await self._snapshots.commit(snapshot)
        await self._worker_group.broadcast(SnapshotCommitted(step=snapshot.step))

    def _announce(self, announcement: CommitAnnouncement) -> None:
        """Tell all members, this node's own workers included, what is committed."""
        self._connections.announce(announcement)
        self._receive_announcement(announcement)

    def _receive_announcement(self, announcement: CommitAnnouncement) -> None:
        known = self._announced
        if known is None or announcement.snapshot > known.snapshot:
            self._announced = announcement
            self._wake.set()

    def _on_snapshot_event(self, event: SnapshotEvent) -> None:
        """Pass on what the snapshot server has protected or stored, or has failed to."""
        match event:
            case Protected():
                self._report()
            case RestoreChecked():
                self._note_restore(event)
            case Persisted() | AlreadyStored() | PersistFailed():
                attempt = self._part_attempt
                # An earlier attempt may end after the next one has begun.
                if attempt is not None and event.attempt == attempt.name:
                    self._membership.update(persisted=attempt.answer(stored_part(event)))
            case ServerDied():
                self._worker_group.fail(f"the snapshot server of {self._config.node} died")
        self._wake.set()

    def _note_restore(self, checked: RestoreChecked) -> None:
        """Record how what was restored compares; if it is wrong, restore again."""
        step = checked.snapshot.step
        if checked.snapshot.generation != self._worker_group.generation:
            return
        self._membership.update(
            restore_comparison=RestoreComparison(step, checked.nbytes, checked.differing)
        )
        if checked.differing:
            wrong = (
                f"the state restored at step {step} differs from the snapshot in "
                f"{', '.join(checked.differing)}"
            )
            log.error("%s", wrong)
            if checked.is_wrong:
                self._worker_group.fail(wrong)

    def _report(self) -> None:
        """Report to the leader what is protected here."""
        record = self._membership.record
        protected = self._snapshots.protected
        if self._drained_generation == record.generation:
            # Once it has drained the leader goes by the record: others may still wait for this
            # snapshot's commit.
            self._membership.update(sealed=self._snapshots.sealed, protected=protected)
            return
        report = NodeReport(
            node=record.node,
            lease=record.lease,
            generation=record.generation,
            step=self._worker_group.step,
            protected=protected,
        )
        self._membership.receive_report(report)
        if not self._membership.leads:
            self._connections.report(report)

    async def _publish(self, action: Publish) -> None:
        if action.is_stored:
            return
        attempt = PartAttempt(action.request, action.revision)
        try:
            await self._snapshots.publish(attempt, action.parts)
        except ServerGone as error:
            raise JobFailed(str(error)) from error


def _cause_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error of a group that explains the others; the group if there is none."""
    for kind in _CAUSES:
        matching = errors.subgroup(kind)
        if matching is not None:
            return _first_leaf(matching)
    return errors


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
