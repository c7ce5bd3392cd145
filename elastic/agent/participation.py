"""Takes part in the job on one node, over as many memberships as that takes.

A single event loop. All that it knows is the membership's view, the state of its workers and what
the snapshot server holds; `_reconcile` compares them after every event and takes the next steps, so
the order in which events arrive does not matter. `GenerationFollower` enters and ends generations,
`NodeSnapshots` passes on what is committed and stored, `RecordUpdates` writes the node's record.

A membership that is lost costs no state: the workers stop, the snapshot server keeps what they have
sealed, and the node's next record lists it. A snapshot server that dies is replaced, and the node
takes part without what it held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.action_log import log_departure
from keepstep.elastic.agent.config import AgentConfig
from keepstep.elastic.agent.departure import Departure
from keepstep.elastic.agent.generation_follower import GenerationFollower
from keepstep.elastic.agent.local_node import LocalNode
from keepstep.elastic.agent.membership import Membership
from keepstep.elastic.agent.node_snapshots import NodeSnapshots
from keepstep.elastic.agent.peer_connections import AgentListener, PeerConnections
from keepstep.elastic.agent.record_updates import RecordUpdates
from keepstep.elastic.agent.snapshot_process import ServerGone
from keepstep.elastic.agent.standstill import StandstillWatch
from keepstep.elastic.agent.state_directory import StateDirectory
from keepstep.elastic.agent.store_socket import StoreSocket
from keepstep.elastic.agent.worker_group import WorkerGroup
from keepstep.elastic.errors import (
    InvariantViolated,
    JobFailed,
    LeaseLost,
    StoreUnavailable,
    UsageError,
)
from keepstep.elastic.node.state import drained_on_joining
from keepstep.elastic.rendezvous.decide import may_leave
from keepstep.elastic.rendezvous.join_protocol import Restart
from keepstep.elastic.rendezvous.kept_state import KeptState, is_kept
from keepstep.elastic.rendezvous.records import Failure, FailureKind, NodeRecord, Result
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.store.contract import Store
from keepstep.elastic.worker import telemetry
from keepstep.transport import Identity
from keepstep.transport.addresses import host_and_port

log = logging.getLogger("keepstep")

_REJOIN_S = 0.05
_MOST_REJOIN_S = 1.0
"""The pauses between attempts to join again, which may fail at once, grow to this."""

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
        worker_group: the workers of this node, which set `wake`.
        left: what the last agent of this node has left, and its directory; None: nothing.
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
        worker_group: WorkerGroup,
        left: tuple[StateDirectory, KeptState] | None = None,
    ) -> None:
        self._left = left
        self._is_kept = True
        self._config = config
        self._store = store
        self._agent_listener = agent_listener
        self._departure = departure
        self._wake = wake
        self._secret: bytes | None = None
        self._reported_outage = ""
        self._node = LocalNode(config, worker_group)
        self._snapshots = NodeSnapshots(self._node, wake.set)
        self._standstill = StandstillWatch(self._node, wake.set)
        self._follower = GenerationFollower(
            self._node, self._snapshots, store_socket, self._standstill, wake.set
        )
        self._updates = RecordUpdates(self._node, self._snapshots)
        self._node.membership = self._new_membership(
            NodeRecord(
                node=config.node,
                host=config.host,
                nproc=config.workers,
                agent=host_and_port(config.host, agent_listener.port),
                server="",
                store_port=store_socket.port,
                lease=0,
                digest=config.digest,
                domain=config.domain,
                serves_coordinator=config.serves_coordinator,
            )
        )

    @property
    def view(self) -> View:
        """The job's keys, as far as this node follows them."""
        return self._node.membership.view

    def end_job(self, result: Result) -> None:
        """Have the leader end the job for all nodes."""
        self._node.membership.update(ended=result)

    async def run(self) -> bool:
        """Take part until the job ends; return False if this node left before.

        Raises:
            InvariantViolated: the job's keys break an invariant; see its message.
            JobFailed, UsageError, StoreUnavailable: as `Agent.run`.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end_server)
            stack.push_async_callback(self._node.worker_group.stop, 0.0)
            stack.push_async_callback(self._standstill.close)
            if self._left is not None:
                await self._go_on(*self._left)
            member_until_s = float("-inf")
            pause_s = _REJOIN_S
            reported = ""
            while True:
                try:
                    await self._join()
                    pause_s, reported = _REJOIN_S, ""
                    return await self._take_part()
                except LeaseLost as lost:
                    result = self._node.membership.view.result
                    if result is not None:
                        # Joining again would restart the job.
                        return self._end_with(result)
                    log.error("%s; its workers stop, joining again", lost)
                    member_until_s = self._node.membership.answered_s
                    await self._node.membership.restore_job()
                    await self._end_work()
                except InvariantViolated:
                    self._is_kept = False
                    raise
                except StoreUnavailable as unavailable:
                    # Other nodes wait for the end of an outage as well.
                    if time.monotonic() > member_until_s + self._config.policy.quorum_timeout_s:
                        raise
                    if self._is_overdue:
                        log.warning("left without joining again: %s", unavailable)
                        return False
                    if str(unavailable) != reported:
                        reported = str(unavailable)
                        log.error("%s; trying again", unavailable)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MOST_REJOIN_S)
        raise AssertionError("unreachable: the stack suppresses nothing")

    def _new_membership(
        self, record: NodeRecord, held: View | None = None, restart: Restart | None = None
    ) -> Membership:
        config = self._config
        return Membership(
            self._store,
            config.job,
            config.policy,
            record,
            config.lease_ttl_s,
            self._wake.set,
            self._snapshots.publish,
            self._secret,
            self._snapshots.announce,
            held,
            restart,
        )

    async def _go_on(self, directory: StateDirectory, kept: KeptState) -> None:
        """Go on with what the last agent of this node has left in memory."""
        own = self._node.membership.record
        try:
            held = await self._snapshots.attach(directory, kept)
            self._secret = self._snapshots.server.secret
            restart = Restart(kept.may_restore)
            self._node.membership = self._new_membership(own, held, restart)
            # At once: a node that comes to it first would start the job again.
            await self._node.membership.restore_job()
            record = await self._snapshots.verify_attached(own, kept.record)
        except SnapshotUnavailable as error:
            log.warning("what this node kept in memory is lost: %s", error)
            self._secret = None
            await self._snapshots.supervisor.close()
            self._node.forget()
            self._node.membership = self._new_membership(own)
            return
        newest = max(record.sealed, default=None)
        if newest is not None:
            log.info("found the state of step %d, which this node kept in memory", newest.step)
        self._node.membership = self._new_membership(record, held, restart)

    async def _end_server(self) -> None:
        """End the snapshot server, or leave it to the next agent of this node."""
        supervisor, keep_s = self._snapshots.supervisor, self._config.keeping.keep_s
        held = self._held if self._is_kept else ()
        if held:
            log.warning(
                "the state of step %d is kept in memory for %s: run the same line again to go on "
                "from it (--keep-state 0 switches this off)",
                max(held).step, described_time(keep_s),
            )  # fmt: skip
        await supervisor.close(keep=bool(held))

    @property
    def _held(self) -> tuple[SnapshotId, ...]:
        """The snapshots that are left in memory for the next agent if this one ends now."""
        supervisor = self._snapshots.supervisor
        may_keep = bool(self._config.keeping.keep_s) and supervisor.has_server
        is_found = may_keep and self._snapshots.are_kept and not supervisor.has_died
        return supervisor.server.sealed if is_found else ()

    async def _join(self) -> None:
        """Become a member, with a snapshot server of the job that answers."""
        secret = await self._node.membership.join()
        if not self._node.membership.record.server:
            # On a loaded machine a snapshot server may start for longer than a lease lasts.
            await self._node.membership.renew_during(self._prepare(secret))
        self._node.drained = drained_on_joining(self._node.state)
        await self._agent_listener.admit(
            secret, self._node.membership.receive_report, self._snapshots.receive_announcement
        )

    async def _prepare(self, secret: bytes) -> None:
        """Start a snapshot server for a job in which this node has taken no part."""
        # Whatever was held belongs to a job that is over.
        self._secret = None
        await self._snapshots.supervisor.close()
        await self._node.worker_group.stop(0.0)
        self._node.forget()
        await self._snapshots.start(secret)
        self._secret = secret

    async def _take_part(self) -> bool:
        """Work as a member until the job ends or this node leaves.

        Raises:
            LeaseLost: the node was declared gone.
        """
        assert self._secret is not None
        self._node.connections = PeerConnections(
            Identity(self._config.node, self._secret), self._node.membership.revoke
        )
        try:
            async with asyncio.TaskGroup() as group:
                membership_task = group.create_task(self._node.membership.run())
                server_task = group.create_task(self._snapshots.supervisor.watch())
                try:
                    return await self._work(membership_task)
                finally:
                    membership_task.cancel()
                    server_task.cancel()
        except BaseExceptionGroup as errors:
            raise _cause_of(errors) from None
        finally:
            await self._node.connections.close()
        raise AssertionError("unreachable: the task group returns or raises")

    async def _end_work(self) -> None:
        """Stop the workers once the membership is lost, and keep what they have sealed."""
        group = self._node.worker_group
        while not await self._follower.drain_at_once():
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.abort_timeout_s):
                    await self._wake.wait()
        self._node.drained = group.generation
        # A lease may be lost before the first server is started.
        if self._secret is not None:
            try:
                await self._snapshots.server.verify()
            except ServerGone:
                await self._snapshots.replace()
            self._snapshots.record(phase=self._node.state.phase, step=group.step)
        lost = self._node.membership
        self._node.membership = self._new_membership(lost.record, lost.held)

    async def _mend_server(self) -> bool:
        """Replace a snapshot server that died; False if workers of its generation still drain."""
        group = self._node.worker_group
        if not await self._follower.drain_at_once():
            return False
        self._node.drained = group.generation
        await self._snapshots.replace()
        return True

    async def _work(self, membership_task: asyncio.Task[None]) -> bool:
        while True:
            self._wake.clear()
            try:
                is_leaving = await self._reconcile()
            except ServerGone:
                self._snapshots.supervisor.record_death()
                continue
            if is_leaving:
                return await self._leave(membership_task)
            self._node.connections.watch(self._node.membership.watched_peers)
            try:
                async with asyncio.timeout(self._next_deadline_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _leave(self, membership_task: asyncio.Task[None]) -> bool:
        """Stop the workers, give up the lease, and return whether the job has ended.

        Raises:
            JobFailed: the job has failed, or a worker cannot be killed.
        """
        view = self._node.membership.view
        result = view.result
        has_failed = result is not None and not result.succeeded
        # Read now: of workers that have ended nothing is.
        step = self._node.worker_group.step
        unkillable: JobFailed | None = None
        try:
            await self._node.worker_group.stop(0.0 if has_failed else 1.0)
        except JobFailed as failed:
            # The others go on without this node.
            unkillable = failed
        # Leaving deletes the node's own key, which must not look like a lost lease.
        membership_task.cancel()
        await asyncio.wait([membership_task])
        self._is_kept = is_kept(result, view, self._config.node)
        keep_s = self._config.keeping.keep_s if self._is_kept and self._held else 0.0
        if keep_s:
            self._node.membership.update(step=step)
            self._snapshots.keep(is_final=may_leave(view, self._config.node))
        await self._node.membership.leave(keep_s)
        if unkillable is not None:
            raise unkillable
        if result is not None:
            return self._end_with(result)
        log_departure(view)
        return False

    def _end_with(self, result: Result) -> bool:
        """Return True for a job that has succeeded.

        Raises:
            JobFailed: it has not.
        """
        self._is_kept = not result.succeeded
        if not result.succeeded:
            raise JobFailed(result.message)
        if self._config.is_recorded:
            telemetry.remove_rings(self._config.job)
        return True

    def _next_deadline_s(self) -> float | None:
        """Return in how many seconds to look again although nothing changes; None: never."""
        deadlines = [
            self._node.worker_group.drain_until_s,
            self._node.worker_group.entry_until_s,
            self._updates.due_s,
            self._snapshots.due_s,
            self._standstill.due_s,
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
        if self._node.membership.view.result is not None or self._is_ready_to_leave():
            return True
        if self._snapshots.supervisor.has_died and not await self._mend_server():
            return False
        await self._snapshots.follow()
        if not self._node.worker_group.workers:
            self._node.worker_group.warm_up()
        await self._follower.follow()
        self._report_outage()
        self._node.worker_group.start_spares()
        self._updates.update()
        return False

    def _report_outage(self) -> None:
        """Say once what an outage of the coordinator stops, and when it is over."""
        outage, failure = self._node.membership.outage, self._node.worker_group.failure
        found = describe_outage(outage, failure, self._config.policy.quorum_timeout_s)
        if found != self._reported_outage:
            log.warning("%s", found or "the coordinator answers again")
            self._reported_outage = found

    def _is_ready_to_leave(self) -> bool:
        view = self._node.membership.view
        eviction = view.evictions.get(self._config.node)
        if eviction is not None:
            self._departure.begin(f"evicted: {eviction.reason}")
        if self._departure_deadline_s is None:
            return False
        # A script that has not joined may handle SIGTERM by storing its state.
        left_s = self._departure_deadline_s - time.monotonic()
        group = self._node.worker_group
        group.term_grace_s = max(group.term_grace_s, left_s)
        self._node.membership.update(leaving=True)
        if may_leave(view, self._config.node):
            return True
        if self._is_overdue:
            log.error(
                "the %.0f s of grace (--grace, of torchrun --rdzv-conf grace=) are over: what this "
                "node has not handed over is lost",
                self._config.grace_s,
            )
        return self._is_overdue


def described_time(time_s: float) -> str:
    """Return a time in the unit in which it is a round number."""
    return f"{time_s / 60:g} min" if time_s >= 60 else f"{time_s:g} s"


def describe_outage(outage: str, failure: Failure | None, waits_s: float) -> str:
    """Return what an outage of the coordinator stops on a node; "" if there is no outage.

    Args:
        outage: why the coordinator does not answer; "" if it does.
        failure: what has ended the generation on this node; None if it trains.
        waits_s: how long the node waits for the coordinator.
    """
    if not outage:
        return ""
    if failure is None:
        return (
            f"{outage}; training goes on, but until the coordinator answers nothing is stored and "
            "no loss is repaired"
        )
    cause = "a peer is lost" if failure.kind is FailureKind.PEER else failure.summary
    return (
        f"training stands still: {cause}, and no loss is repaired while the coordinator does not "
        f"answer ({outage.partition(' (')[0]}). Start it again, where a node served it by running "
        f"that node's line again, within {waits_s:.0f} s: until then this node keeps its newest "
        "snapshot in memory, and training goes on from there"
    )


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
