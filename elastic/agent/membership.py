"""Runs a node's membership of a job: lease, record, mirror of the job's keys, and leadership.

The shell around `keepstep.elastic.rendezvous`: `decide` makes the leader's decisions,
`join_protocol` those about joining, and `transactions` builds every write with its conditions. So
nothing is accepted that a node writes after it was declared gone, or on a view that is out of date.
`invariants` checks every record, every action of a leader and every change of the view; a violation
stops this member before it writes.

A follower mirrors what every agent follows (`Keys.followed`), and the members that it is about; the
leader mirrors all of the job's keys. So what nodes write while they recover goes to the leader, and
not from each to all. That its lease has ended a follower learns when it renews it, or writes.

When a member of the coordinator dies, the outcome of a write may stay unknown. A record is written
again until the coordinator is known to hold it; a leader decides again once the view has had time
to show what became of its action.

While the coordinator does not answer, the membership lasts: nobody can learn that this node is
gone, and if others learnt it before, then nothing that it writes is accepted, and its workers meet
broken collectives. It ends when the coordinator answers that the lease has ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.agent.action_log import log_action
from keepstep.elastic.agent.holder_probes import HolderProbes
from keepstep.elastic.agent.peer_connections import Peer, probe
from keepstep.elastic.agent.publisher import Publisher
from keepstep.elastic.agent.view_reader import ViewReader
from keepstep.elastic.errors import (
    InvariantViolated,
    JobFailed,
    LeaseLost,
    StoreUnavailable,
    UsageError,
)
from keepstep.elastic.rendezvous import (
    actions,
    join_protocol,
    transactions,
)
from keepstep.elastic.rendezvous.commits import Announcements, needs_decision
from keepstep.elastic.rendezvous.decide import decide
from keepstep.elastic.rendezvous.decision import LeaderState
from keepstep.elastic.rendezvous.invariants import (
    check_action,
    check_record,
    check_transition,
    check_view,
)
from keepstep.elastic.rendezvous.join_protocol import (
    AwaitHolders,
    AwaitPredecessor,
    Join,
    Lease,
    RemoveFinishedJob,
    Restart,
    RestoreJob,
)
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    NodeRecord,
    NodeReport,
    RestartRequest,
    decode_secret,
)
from keepstep.elastic.rendezvous.reports import Reports
from keepstep.elastic.rendezvous.transactions import Transaction
from keepstep.elastic.rendezvous.view import (
    Keys,
    View,
    apply,
    from_listing,
    with_reports,
    without_unlisted_chunks,
)
from keepstep.elastic.store.contract import Change, Committed, Reset, Store
from keepstep.elastic.store.outages import outlast_outage

log = logging.getLogger("keepstep")

_RENEWALS_PER_TTL = 4
_LEAVE_TIMEOUT_S = 10.0
_PREDECESSOR_POLL_S = 0.2
_UNKNOWN_WRITE_WAIT_S = 2.0
_OUTAGE_POLL_S = 0.2
# A leader decides for at most a fifth of the time, and not later than this after a change.
_REST_RATIO = 4
_MOST_REST_S = 0.05


class Membership:
    """One node's membership of one job.

    `on_change` is called, on the event loop, whenever the view has changed. `publish` writes the
    manifest of a checkpoint whose parts are all stored; meanwhile other things are decided. `run`
    works until it is cancelled, and raises `LeaseLost` when the node was declared gone: the caller
    then stops its workers and joins again with another membership.

    Args:
        store: the coordinator.
        job: the job's name.
        policy: the job's limits.
        record: the node's first record. It may carry over what an earlier membership held.
        lease_ttl_s: how long after its last sign of life the node is declared gone.
        on_change: called after each change of the view.
        publish: writes a manifest; raises JobFailed if it is not written.
        secret: of the job in which the record's state arose; None if it has none.
        held: the newest view that had a generation of this node's membership before.
        announce: tells all members, this node included, what this leader has found committed.
        restart: set if that was the membership of an agent before this one.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        policy: RendezvousPolicy,
        record: NodeRecord,
        lease_ttl_s: float,
        on_change: Callable[[], None],
        publish: Callable[[actions.Publish], Awaitable[None]],
        secret: bytes | None = None,
        announce: Callable[[CommitAnnouncement], None] = lambda _: None,
        held: View | None = None,
        restart: Restart | None = None,
    ) -> None:
        self._restart = restart
        self._store = store
        self._secret = secret
        self._keys = Keys(job)
        self._reader = ViewReader(store, self._keys, record.node)
        self._policy = policy
        self._ttl_s = lease_ttl_s
        self._on_change = on_change
        self._on_announce = announce
        self._dirty = asyncio.Event()
        self._changed = asyncio.Event()
        self._publisher = Publisher(publish, self._changed.set)
        self._probes = HolderProbes(self._changed.set)
        self._lease = Lease(id=0, ttl_s=lease_ttl_s, until_s=0.0)
        self._created = 0
        """Revision at which this membership created the node's key."""
        self._modified = 0
        """Revision at which this membership last wrote the node's key."""
        self._written: NodeRecord | None = None
        self._mirrors_all = False
        self._reports = Reports()
        self._announcements = Announcements()
        self._announces_later: asyncio.TimerHandle | None = None
        self.answered_s = time.monotonic()
        """When the coordinator was last asked for what it has answered, in monotonic seconds."""
        # When the leader decides again although nothing changes; None: never, or it is deciding.
        self._decides_at_s: float | None = None
        self.record = record
        self.view = View()
        self.held = held
        """The newest view of this node that had a generation."""
        self.outage = ""
        """Why the coordinator has not answered for longer than a lease; "" if it has."""
        self._logged = (0, "")

    @property
    def leads(self) -> bool:
        """Whether this node decides at present, and sees all that it decides from."""
        return self._mirrors_all and self._led_since > 0

    @property
    def watched_peers(self) -> Sequence[Peer]:
        """The agents that this one watches: the leader watches everyone, everyone the leader."""
        own, leader = self.record.node, self.view.leadership
        if self.leads:
            return [joined.record for node, joined in self.view.nodes.items() if node != own]
        return [leader] if leader is not None and leader.node != own else []

    @property
    def _led_since(self) -> int:
        """The revision at which this membership took the lead; 0 if it has not."""
        return join_protocol.led_since(self.view, self._lease.id)

    async def join(self) -> bytes:
        """Take a lease and announce the node; return the job's secret.

        Raises:
            UsageError: the job's name is taken by a job that runs something else, or the node's
                name by another node.
            StoreUnavailable: the coordinator does not answer.
        """
        began_s = time.monotonic()
        holds_state = self.held is not None and bool(self.held.snapshot or self.record.sealed)
        waits_s = self._policy.return_s + _LEAVE_TIMEOUT_S if self._policy.max_nodes > 1 else 0.0
        while True:
            view = await self._reader.before_joining(self.view)
            secret = self._secret.hex().encode() if self._secret is not None else None
            keeps_state = join_protocol.keeps_state(view, secret, self.held)
            if secret is not None and keeps_state:
                self.record = join_protocol.joining_again(view, self.record)
            may_wait = time.monotonic() < began_s + waits_s
            match join_protocol.next_join_step(
                self._keys, view, self.record, self.held, self._restart, may_wait=may_wait
            ):
                case RemoveFinishedJob(transaction):
                    await self._write_until_known(transaction)
                case RestoreJob():
                    await self._restore()
                case AwaitHolders():
                    self._log_once("waiting for other nodes that keep the state of the last run")
                    await asyncio.sleep(_PREDECESSOR_POLL_S)
                case AwaitPredecessor(predecessor):
                    await self._await_predecessor(predecessor, time.monotonic() - began_s)
                case Join() if keeps_state:
                    if await self._claim_name(view, self.record):
                        break
                case Join() if await self._claim_name(
                    view, join_protocol.without_state(self.record)
                ):
                    if holds_state:
                        log.error(
                            "job %s has %s without this node%s; its state in this node's memory "
                            "is dropped",
                            self._keys.job,
                            "gone on" if self._restart is None else "ended or gone on",
                            ", after its coordinator lost its keys" if not self._restart else "",
                        )
                    break
        assert self.view.secret is not None, "nobody joins without writing or reading the secret"
        return decode_secret(self.view.secret)

    async def restore_job(self) -> None:
        """Write the job's keys at once if the coordinator has lost them.

        A node that comes to it first would start the job again while this one still stops its
        workers. Where the coordinator does not answer, the next membership sees to it.
        """
        with suppress(StoreUnavailable, TimeoutError, UsageError):
            async with asyncio.timeout(_UNKNOWN_WRITE_WAIT_S):
                await self._restore()

    async def _restore(self) -> None:
        """Restore the job's keys, if the next step to join is still to do so."""
        if self.held is None:
            return
        # Documents that not every agent follows are replaced as well.
        view = from_listing(self._keys, await self._store.read(self._keys.prefix))
        step = join_protocol.next_join_step(self._keys, view, self.record, self.held, self._restart)
        if not isinstance(step, RestoreJob):
            return
        if self._restart is None:
            log.warning("the coordinator has lost job %s; restoring its keys", self._keys.job)
        for part in step.transactions:
            await self._write_until_known(part)

    def _log_once(self, message: str) -> None:
        if self._logged != (0, message):
            self._logged = (0, message)
            log.info("%s", message)

    async def _await_predecessor(self, predecessor: NodeRecord, waited_s: float) -> None:
        """Revoke the lease of a dead agent of this node's name, or wait for it to end."""
        is_own = predecessor.agent == self.record.agent
        lives = False if is_own else await probe(predecessor)
        if join_protocol.may_revoke_predecessor(
            self._keys, self.record, predecessor, lives, waited_s, 2 * self._ttl_s
        ):
            await self._store.revoke(predecessor.lease)
        else:
            await asyncio.sleep(_PREDECESSOR_POLL_S)

    async def _claim_name(self, view: View, record: NodeRecord) -> bool:
        """Write the node's first record under a new lease; False if the view is out of date."""
        asked_s = time.monotonic()
        lease = Lease.granted(await self._store.grant(self._ttl_s), self._ttl_s, asked_s)
        record = replace(record, lease=lease.id)
        check_record(view, None, record)
        secret = secrets.token_hex(32).encode()
        await self._write_until_known(transactions.join(self._keys, view, record, secret))
        # The first of two attempts may have been applied: the lease shows whether the key is ours.
        stored = await self._reader.own_key()
        if stored is None or stored.lease != lease.id:
            await self._store.revoke(lease.id)
            return False
        view = await self._reader.followed(self.view)
        check_view(view)
        self.view, self.record = view, record
        self._lease, self._created, self._modified = lease, stored.created, stored.created
        self._written = record
        if view.generation is not None:
            self.held = view
        return True

    async def run(self) -> None:
        """Keep the lease, mirror the view, write the record, and decide while this node leads.

        Raises:
            LeaseLost: the node was declared gone, or the coordinator was away for too long.
            InvariantViolated: the view, or an action of this leader, breaks an invariant.
            UsageError, JobFailed: the membership cannot go on.
        """
        error: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._watch(), self._renew(), self._write(), self._lead()):
                    group.create_task(work)
        except* LeaseLost as lost:
            error = lost.exceptions[0]
        except* (UsageError, JobFailed, InvariantViolated) as failed:
            error = error or failed.exceptions[0]
        finally:
            self._publisher.stop()
            self._probes.ask(())
            if self._announces_later is not None:
                self._announces_later.cancel()
        # Not raised above: Python 3.11.2 would put it into a group again.
        if error is not None:
            raise error from None

    async def renew_during(self, work: Awaitable[None]) -> None:
        """Keep the lease while something is done between `join` and `run`, however long it takes.

        Raises:
            LeaseLost: the node was declared gone meanwhile; what was begun is done nevertheless.
        """
        renewing = asyncio.create_task(self._renew())
        try:
            await work
        finally:
            renewing.cancel()
            (ended,) = await asyncio.gather(renewing, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    def update(self, **changes: Any) -> None:
        """Change fields of the record, to be written soon; states in between may be skipped."""
        record = replace(self.record, **changes)
        if record != self.record:
            self.record = record
            self._dirty.set()

    @property
    def has_unwritten_changes(self) -> bool:
        """Whether the record is about to be written."""
        return self._dirty.is_set()

    def receive_report(self, report: NodeReport) -> None:
        """Keep a node's newest report, this node's own included; used while this node leads."""
        self._reports.receive(report)
        generation = self.view.generation
        if not self.leads or generation is None or not self._reports.completes(report, generation):
            return
        view, wall_s = self._reported_view(), time.time()
        decides_at_s = self._decides_at_s
        decides_in_s = None if decides_at_s is None else decides_at_s - time.monotonic()
        announced = self._announce(view)
        if announced is None or needs_decision(view, announced, wall_s, decides_in_s):
            self._changed.set()

    def _reported_view(self) -> View:
        view = with_reports(self.view, self._reports.newest)
        return replace(view, gone=self._probes.gone)

    def _announce(self, view: View) -> SnapshotId | None:
        """Announce what all members protect, if this node leads and that is new; return it."""
        if not self.leads:
            return None
        wall_s = time.time()
        found = self._announcements.next(view, self._reports, wall_s)
        held_until_s = self._announcements.held_until_s
        if held_until_s is not None and held_until_s > wall_s and self._announces_later is None:
            # Whatever the coordinator is asked for meanwhile may take longer.
            self._announces_later = asyncio.get_running_loop().call_later(
                held_until_s - wall_s, self._announce_what_was_held
            )
        if found is None:
            return None
        self._on_announce(found)
        return found.snapshot

    def _announce_what_was_held(self) -> None:
        self._announces_later = None
        self._announce(self._reported_view())

    async def revoke(self, peer: Peer) -> None:
        """Declare another node gone, because its agent's process is certainly dead."""
        await self._store.revoke(peer.lease)

    async def complete_restart_request(self, request: RestartRequest) -> None:
        """Delete a request that this node has carried out."""
        removal = transactions.complete_restart(
            self._keys, self.view, self.record.node, self._created, request
        )
        await outlast_outage(lambda: self._write_until_known(removal))

    async def leave(self, keep_s: float = 0.0) -> None:
        """Give up the lease. The last member to leave deletes the job's keys.

        Args:
            keep_s: how long this node keeps the job's state in memory; for as long the coordinator
                keeps what its nodes need to go on.
        """
        try:
            if self.leads and self.view.result is not None:
                await self._wait_for_others_to_leave()
            # Before the nodes: whoever joins after that changes it.
            wanted = self._keys.prefix if keep_s else self._keys.single("last_join")
            view = from_listing(self._keys, await self._store.read(wanted))
            if not await self._reader.has_others():
                node = self.record.node
                if keep_s and view.secret is not None:
                    lease = await self._store.grant(keep_s)
                    removal = transactions.keep_failed_job(
                        self._keys, view, node, self._created, lease
                    )
                else:
                    removal = transactions.remove_job(self._keys, view, node, self._created)
                await self._commit(removal)
            await self._store.revoke(self._lease.id)
        except StoreUnavailable as error:
            log.warning(
                "could not sign off (%s); the lease ends by itself in %.0f s", error, self._ttl_s
            )

    async def _wait_for_others_to_leave(self) -> None:
        """Wait until all other nodes have read the result and left."""
        nodes = self._keys.node()
        revision = (await self._store.read(nodes, limit=1)).revision
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(_LEAVE_TIMEOUT_S),
                aclosing(self._store.watch(nodes, revision)) as changes,
            ):
                while await self._reader.has_others():
                    await anext(changes)

    async def _watch(self) -> None:
        """Mirror what this member follows: from when it leads on, all of the job's keys."""
        while True:
            try:
                if self._led_since and not self._mirrors_all:
                    listing = await self._store.read(self._keys.prefix)
                    self._mirrors_all = True
                    self._take_over(from_listing(self._keys, listing))
                await self._follow_changes()
            except StoreUnavailable as error:
                log.debug("%s; watching again", error)
                await asyncio.sleep(_OUTAGE_POLL_S)

    async def _follow_changes(self) -> None:
        """Follow changes until the member follows other keys, or has missed some members."""
        prefix = self._keys.prefix if self._mirrors_all else self._keys.followed
        async with aclosing(self._store.watch(prefix, self.view.revision)) as watched:
            async for change in watched:
                match change:
                    case Reset(listing) if self._mirrors_all:
                        self._take_over(from_listing(self._keys, listing))
                    case changes:
                        if isinstance(changes, Reset) or not await self._fold(changes):
                            self._take_over(await self._reader.followed(self.view))
                            return
                if self._led_since and not self._mirrors_all:
                    return

    async def _fold(self, changes: tuple[Change, ...]) -> bool:
        """Apply the changes of a revision; False if members that it lists are gone already."""
        before: View | None = self.view
        if not self._mirrors_all:
            items = [change.value for change in changes if change.value is not None]
            before = await self._reader.with_missing_chunks(self.view, items)
        if before is None:
            return False
        view = apply(self._keys, before, changes)
        check_transition(before, view)
        self._show(view if self._mirrors_all else without_unlisted_chunks(view))
        return True

    def _take_over(self, view: View) -> None:
        """Go on from a view that was read again."""
        check_view(view)
        self._show(view)

    def _show(self, view: View) -> None:
        for name, reason in view.unreadable.items():
            if self.view.unreadable.get(name) != reason:
                log.warning("%s counts as absent: %s", name, reason)
        if self.view.secret is not None and join_protocol.was_restored(view, self.view):
            # The coordinator has lost them, or other nodes have restored those that it had lost.
            raise LeaseLost(f"the keys of this run of job {self._keys.job} are gone")
        self.view = view
        if view.generation is not None:
            self.held = view
        self._changed.set()
        self._on_change()

    async def _renew(self) -> None:
        """Renew the lease well before it ends, however long the coordinator does not answer.

        Raises:
            LeaseLost: it has ended, or the coordinator was away for longer than the job waits.
        """
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS_PER_TTL)
            asked_s = time.monotonic()
            try:
                ttl_s = await self._store.renew(self._lease.id)
            except StoreUnavailable as error:
                now_s = time.monotonic()
                if self._lease.is_given_up(now_s, self._policy.quorum_timeout_s):
                    raise LeaseLost(
                        f"node {self.record.node} could not renew its lease: {error}"
                    ) from None
                if now_s >= self._lease.until_s:
                    self._set_outage(str(error))
                continue
            self._set_outage("")
            self._lease = self._lease.renewed(ttl_s, asked_s)
            self.answered_s = asked_s
            self._announcements.note_answer(time.time() - (time.monotonic() - asked_s))

    def _set_outage(self, outage: str) -> None:
        if bool(outage) != bool(self.outage):
            self.outage = outage
            self._on_change()

    async def _write(self) -> None:
        """Write the record whenever it has changed."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            record = self.record
            if record != self._written:
                check_record(self.view, self._written, record)
                await outlast_outage(partial(self._write_record, record))
                self._written = record

    async def _write_record(self, record: NodeRecord) -> None:
        """Write a record over the one that this membership wrote last.

        Raises:
            LeaseLost: the node was declared gone.
        """
        transaction = transactions.write_record(self._keys, record, self._modified)
        done = await self._write_until_known(transaction)
        if done.succeeded:
            self._modified = done.revision
            return
        # The first of two attempts may have been applied.
        stored = await self._reader.own_key()
        self._modified = join_protocol.settle_record(stored, self._created, record)

    async def _commit(self, transaction: Transaction) -> Committed:
        return await self._store.commit(transaction.conditions, transaction.operations)

    async def _write_until_known(self, transaction: Transaction) -> Committed:
        """Commit what may be committed twice, until its fate is known."""
        while True:
            try:
                return await self._commit(transaction)
            except StoreUnavailable as error:
                if not error.unknown:
                    raise
                log.debug("%s; writing it again", error)

    async def _lead(self) -> None:
        """Decide, act, and wait for changes, as long as this node leads.

        Raises:
            InvariantViolated: an action would break what the rendezvous promises.
        """
        leader_state = LeaderState()
        rest_s = 0.0
        while True:
            self._changed.clear()
            again_at_s = self._decides_at_s = None
            if self.leads:
                view = self._reported_view()
                published = self._publisher.conclude(view)
                if published is not None:
                    await self._perform(view, published)
                    continue
                began_s = time.monotonic()
                decision = decide(self._policy, view, leader_state, began_s, time.time())
                rest_s = min(_MOST_REST_S, _REST_RATIO * (time.monotonic() - began_s))
                if decision.action is not None:
                    check_action(self._policy, view, decision.action)
                self._probes.ask(decision.asks)
                decision = self._publisher.follow(decision, view, began_s)
                leader_state, again_at_s = decision.leader_state, decision.again_at_s
                # Decisions without a message come between, such as commits: once is enough.
                message = (view.generation_number, decision.message)
                if decision.message and message != self._logged:
                    log.info("%s", decision.message)
                    self._logged = message
                if decision.action is not None:
                    await self._perform(view, decision.action)
                    # A new leader finds reports that came before it led.
                    self._announce(self._reported_view())
                    continue
                self._announce(view)
                self._decides_at_s = again_at_s
            else:
                leader_state = LeaderState()
                self._publisher.stop()
                self._probes.ask(())
                if self.view.leader is None:
                    await self._take_lead()
                    continue
            try:
                async with asyncio.timeout(
                    None if again_at_s is None else again_at_s - time.monotonic()
                ):
                    await self._changed.wait()
            except TimeoutError:
                continue
            # Of many nodes each writes its record when a generation begins: what they write in the
            # meantime is decided upon at once.
            await asyncio.sleep(rest_s)

    async def _take_lead(self) -> None:
        """Try to become the leader, and wait until the view shows who is."""
        attempt = transactions.take_lead(
            self._keys,
            self.view,
            self._written_record,
            self._created,
            self._policy.limits,
        )
        with suppress(StoreUnavailable):
            await self._commit(attempt)
        await self._wait_for_change()

    @property
    def _written_record(self) -> NodeRecord:
        assert self._written is not None, "only members lead"
        return self._written

    async def _perform(self, view: View, action: actions.Action) -> None:
        """Write what was decided on a view, and wait until the view shows it.

        Raises:
            InvariantViolated: the write would break what the rendezvous promises.
        """
        parts = transactions.lead(self._keys, view, self._led_since, action, time.time())
        check_transition(view, transactions.preview(self._keys, view, parts))
        log_action(action, view)
        self._announcements.note_sent(action)
        for part in parts:
            try:
                done = await self._commit(part)
            except StoreUnavailable as error:
                log.debug("%s; waiting for the view to show whether it was applied", error)
                await self._wait_for_change()
                return
            if not done.succeeded:
                # The view is out of date.
                await self._wait_for_change()
                return
        while self.view.revision < done.revision:
            await self._changed.wait()
            self._changed.clear()
        self._announcements.note_shown()

    async def _wait_for_change(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNKNOWN_WRITE_WAIT_S):
                await self._changed.wait()
