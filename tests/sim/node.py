"""Plays one node's agent, workers and snapshot server around production's pure functions.

Joining, leases, record writes and leading run `join_protocol`, `transactions`, `decide` and
`invariants` as `keepstep.elastic.agent.membership` does; the agent's steps follow `Participation`
and `GenerationFollower` there. The node sees the job only through its own mirror, which lags
behind, and may stall or be cut off.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.errors import LeaseLost, UsageError
from keepstep.elastic.node.state import (
    Action,
    Drain,
    EndPaused,
    Enter,
    Fence,
    NodeState,
    OrderAbort,
    Workers,
    drained_on_joining,
    due_restarts,
    next_action,
)
from keepstep.elastic.rendezvous import (
    actions,
    checkpoint_schedule,
    commits,
    decide,
    invariants,
    join_protocol,
    publication,
    transactions,
)
from keepstep.elastic.rendezvous.checkpoint_schedule import PartAttempt
from keepstep.elastic.rendezvous.commits import Announcements
from keepstep.elastic.rendezvous.decision import LeaderState
from keepstep.elastic.rendezvous.join_protocol import Lease
from keepstep.elastic.rendezvous.publication import Publication
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    Failure,
    FailureKind,
    Generation,
    NodePhase,
    NodeRecord,
    NodeReport,
    group_of,
)
from keepstep.elastic.rendezvous.reports import Reports
from keepstep.elastic.rendezvous.transactions import Transaction
from keepstep.elastic.rendezvous.view import View, with_reports
from tests.sim.coordinator import KEYS, Sender, UnknownOutcome
from tests.sim.memory import Memory
from tests.sim.rules import must
from tests.sim.storage import StorageError

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

TTL_S = 5.0
RENEWALS = 4
"""How often a lease is renewed while one lasts."""
GRACE_S = 10.0
UNKNOWN_WAIT_S = 2.0
RANKS = 2


@dataclass
class PartWrite:
    """A part of a checkpoint that the snapshot server writes, or has given up."""

    attempt: PartAttempt
    stopped: bool = False


class Node:
    """One agent process with its workers and snapshot server. Names may be used again later."""

    def __init__(self, simulation: Simulation, name: str, number: int, domain: str) -> None:
        self.simulation = simulation
        self.rng: random.Random = simulation.rng
        self.name = name
        self.number = number
        self.domain = domain
        self.servers_started = 0
        self.is_alive = True
        self.stalled_until_s = 0.0
        self.cut_off_until_s = 0.0
        self.unheard_until_s = 0.0
        """Until then no message to or from another agent arrives."""
        self.leaving_since_s: float | None = None
        self.last_step: int | None = None
        self.secret: bytes | None = None
        self.held: View | None = None
        self.held_after_losses = 0
        self.record = NodeRecord(
            node=self.name,
            host="h",
            nproc=RANKS,
            agent=self.agent,
            server="",
            store_port=5,
            lease=0,
            digest="d",
            domain=self.domain,
        )
        self._begin_membership()
        self._begin_job()

    def _begin_membership(self) -> None:
        """Begin without a membership; what the node holds stays."""
        self.lease: Lease | None = None
        self.created = 0
        self.modified = 0
        self.version = 0
        self.revision = 1
        self.mirrors_all = False
        self.written: NodeRecord | None = None
        self.joining: tuple[Transaction, Lease, NodeRecord] | None = None
        self.join_began_s: float | None = None
        self.removal: Transaction | None = None
        self.is_leaving_now = False
        self.renewal: tuple[float, float, float] | None = None
        self.renewed_s = self.answered_s = self.simulation.now_s
        self.unknown_record: tuple[Transaction, NodeRecord] | None = None
        self.unknown_restart: Transaction | None = None
        self.reports = Reports()
        self.announcements = Announcements()
        self.is_settled = True
        """The view shows what the last action has become, or will, at `lead_at_revision`."""
        self.reported: tuple[str, NodeReport] | None = None
        self.decided_at_revision = 0
        self.decide_again_at_s: float | None = None
        self.leader_state = LeaderState()
        self.gone: frozenset[str] = frozenset()
        self.lead_at_revision = 0
        self.lead_after: tuple[int, float] | None = None
        self.publication: Publication | None = None
        self.manifest_stalls_until_s = 0.0

    def _begin_job(self) -> None:
        """Begin without workers, and with a snapshot server that holds nothing."""
        self.worker_generation = 0
        self.workers: dict[int, SnapshotId] = {}
        self.failure: Failure | None = None
        self.drained_generation = self.ordered_generation = self.paused_generation = 0
        self.memory = Memory()
        self.server = ""
        self.has_lost_server = False
        self.committed: SnapshotId | None = None
        self.announced: CommitAnnouncement | None = None
        self.unconfirmed_since_s = 0.0
        self.attempt: PartAttempt | None = None
        self.part_writes: list[PartWrite] = []

    def _start_server(self) -> None:
        """Start a snapshot server; what an earlier one held is gone."""
        self.simulation.servers.pop(self.server, None)
        self.servers_started += 1
        self.memory = Memory()
        self.server = f"tcp:{self.name}:{self.number}.{self.servers_started}"
        self.simulation.servers[self.server] = self
        self.has_lost_server = False
        self.committed, self.attempt, self.part_writes = None, None, []
        self._update(server=self.server, sealed=(), protected=(), persisted=None)

    @property
    def agent(self) -> str:
        """Where the agent is reached."""
        return f"{self.name}:{self.number}"

    @property
    def is_member(self) -> bool:
        """Whether the process believes that it is a member."""
        return self.created > 0

    @property
    def view(self) -> View:
        """The node's mirror: a leader's shows all of the job, a follower's what all follow."""
        coordinator = self.simulation.coordinator
        if self.mirrors_all:
            return coordinator.view_at(self.revision)
        return coordinator.followed_at(self.revision)

    @property
    def sender(self) -> Sender:
        """Under which membership the node writes."""
        return Sender(self.name, self.created)

    def step(self) -> None:
        """Take the steps that the agent would take now."""
        now_s = self.simulation.now_s
        if now_s < self.stalled_until_s:
            return
        is_connected = now_s >= self.cut_off_until_s
        is_answered = is_connected and not self.simulation.coordinator.is_mute
        try:
            if not self.is_member:
                if is_answered:
                    self._join()
                return
            assert self.lease is not None
            if is_answered:
                self._renew(now_s)
                self._receive()
            elif is_connected:
                self._renew_unanswered(now_s)
            if self._reconcile():
                self._leave(is_answered)
                return
            held_until_s = self.announcements.held_until_s
            if self._leads and held_until_s is not None and now_s >= held_until_s:
                self._announce()
            if is_connected:
                self._write_record()
                self._lead()
        except LeaseLost:
            self.lose_membership()

    def lose_membership(self) -> None:
        """Stop the workers and keep what they have sealed, before the node joins again."""
        self.memory.abandon_begun()
        self.drained_generation = self.worker_generation
        self._update(
            phase=self.state.phase,
            step=self._step(),
            committed=self.known_commit,
            **self._holdings(),
        )
        self._begin_membership()

    def crash(self) -> None:
        """End the process, and all that it holds."""
        self.is_alive = False
        self.simulation.servers.pop(self.server, None)

    # Membership

    def _join(self) -> None:
        coordinator, now_s = self.simulation.coordinator, self.simulation.now_s
        if self.joining is None:
            view = coordinator.read()
            held = self.held
            keeps_state = join_protocol.keeps_state(view, self.secret, held)
            if self.secret is not None and keeps_state:
                self.record = join_protocol.joining_again(view, self.record)
            if held is not None and self.held_after_losses < coordinator.losses:
                # A coordinator that has lost its data restarts its count of revisions.
                held = replace(held, revision=view.revision + 1)
            if self.join_began_s is None:
                self.join_began_s = now_s
            try:
                step = join_protocol.next_join_step(KEYS, view, self.record, held)
                match step:
                    case join_protocol.RemoveFinishedJob(transaction):
                        self.simulation.delay(transaction, Sender(self.name, 0))
                    case join_protocol.RestoreJob(parts):
                        # Also where a newcomer has this node's name by now: it knows nothing.
                        for part in parts:
                            coordinator.send(part, Sender("", 0))
                    case join_protocol.AwaitPredecessor(predecessor):
                        lives = self.simulation.probe(predecessor)
                        if join_protocol.may_revoke_predecessor(
                            KEYS, self.record, predecessor, lives,
                            now_s - self.join_began_s, 2 * TTL_S,
                        ):  # fmt: skip
                            coordinator.revoke(predecessor.lease)
                    case join_protocol.Join():
                        lease = Lease.granted(coordinator.grant(TTL_S), TTL_S, now_s)
                        if not keeps_state:
                            self.record = join_protocol.without_state(self.record)
                        record = replace(self.record, lease=lease.id)
                        secret = f"secret of {self.name} at {view.revision}".encode()
                        self.joining = (
                            transactions.join(KEYS, view, record, secret), lease, record
                        )  # fmt: skip
            except UnknownOutcome:
                return
            except UsageError:
                # A person starts it again later, or finds the other one.
                self.join_began_s = None
                self.is_alive = not self.simulation.has_double(self)
            return
        transaction, lease, record = self.joining
        try:
            coordinator.send(transaction, Sender(self.name, 0))
        except UnknownOutcome:
            return  # It is sent again.
        except LeaseLost:
            self.joining = None
            return
        view = coordinator.read()
        self.joining = None
        joined = view.nodes.get(self.name)
        if joined is None or joined.record.lease != lease.id:
            coordinator.revoke(lease.id)
            return
        must(view.secret is not None, "whoever joins knows the job's secret")
        self.record = self.written = record
        self.lease, self.created, self.modified = lease, joined.created, joined.created
        self.revision = view.revision
        if self.view.generation is not None:
            self.held, self.held_after_losses = self.view, coordinator.losses
        self.renewed_s = self.answered_s = now_s
        if not self.record.server:
            self.simulation.servers.pop(self.server, None)
            self.secret = view.secret
            self._begin_job()
            self._start_server()
            self._update(warm=True)
        self.drained_generation = drained_on_joining(self.state)

    def _renew(self, now_s: float) -> None:
        """Take the answer to a renewal, or ask for one; answers may be slow."""
        assert self.lease is not None
        coordinator = self.simulation.coordinator
        if self.renewal is None and now_s >= self.renewed_s + TTL_S / RENEWALS:
            is_slow = not self.simulation.is_calm and self.rng.random() < 0.1
            answer_at_s = now_s + 2.0 if is_slow else now_s
            self.renewal = (now_s, coordinator.renew(self.lease.id), answer_at_s)
        if self.renewal is None or now_s < self.renewal[2]:
            return
        asked_s, ttl_s, _ = self.renewal
        self.announcements.note_answer(asked_s)
        self.answered_s = asked_s
        self.lease, self.renewal, self.renewed_s = self.lease.renewed(ttl_s, asked_s), None, now_s
        end_s = coordinator.lease_end_s(self.lease.id)
        must(
            end_s is None or self.lease.until_s <= end_s,
            "a node's lease ends no later than the coordinator's",
        )

    def _renew_unanswered(self, now_s: float) -> None:
        """Ask for renewals that the coordinator performs, or refuses, without being heard."""
        assert self.lease is not None
        if now_s >= self.renewed_s + TTL_S / RENEWALS:
            self.renewed_s = now_s
            with suppress(LeaseLost):
                self.simulation.coordinator.renew(self.lease.id)

    def _receive(self) -> None:
        """Let the mirror catch up, wholly or in part."""
        newest, before = self.simulation.coordinator.view.revision, self.view
        is_caught_up = self.simulation.is_calm or self.rng.random() < 0.7
        self.revision = newest if is_caught_up else self.rng.randint(self.revision, newest)
        if join_protocol.was_restored(self.view, before):
            raise LeaseLost("the keys of this run of the job are gone")
        if self.view.generation is not None:
            self.held, self.held_after_losses = self.view, self.simulation.coordinator.losses
        if self._led_since() and not self.mirrors_all:
            self.mirrors_all = True
            self.revision = newest

    def _write_record(self) -> None:
        """Write the record until the coordinator holds it, as `Membership._write_record`."""
        coordinator = self.simulation.coordinator
        if self.unknown_record is None:
            if self.record == self.written:
                return
            invariants.check_record(self.view, self.written, self.record)
            self.version += 1
            transaction = transactions.write_record(KEYS, self.record, self.modified)
            self.unknown_record = (transaction, self.record)
        transaction, record = self.unknown_record
        try:
            done = coordinator.send(transaction, replace(self.sender, version=self.version))
        except UnknownOutcome:
            return  # The same is sent again.
        if done.succeeded:
            self.modified, self.written, self.unknown_record = done.revision, record, None
            return
        stored = coordinator.stored(KEYS.node(self.name))
        self.modified = join_protocol.settle_record(stored, self.created, record)
        self.written, self.unknown_record = record, None

    def _lead(self) -> None:
        """Take the lead if nobody has it, decide and act, as `Membership._lead`."""
        now_s = self.simulation.now_s
        if not self._led_since():
            self.leader_state = LeaderState()
            self.publication = None
            self.decided_at_revision = 0
            if self.view.leader is None:
                self._take_lead()
            return
        if not self.mirrors_all:
            return
        self._write_manifest()
        if self.revision < self.lead_at_revision:
            return
        if self.is_settled:
            self.announcements.note_shown()
        if self.lead_after is not None:
            revision, until_s = self.lead_after
            if self.revision == revision and now_s < until_s:
                return
            self.lead_after = None
        is_due = self.decide_again_at_s is not None and now_s >= self.decide_again_at_s
        if self.revision == self.decided_at_revision and not is_due:
            return
        self.decided_at_revision = self.revision
        view = replace(with_reports(self.view, self.reports.newest), gone=self.gone)
        published = publication.conclude(self.publication, view)
        if published is not None:
            self.decided_at_revision = 0
            self._perform(view, published)
            return
        decision = decide.decide(self.simulation.policy, view, self.leader_state, now_s, now_s)
        if decision.action is not None:
            invariants.check_action(self.simulation.policy, view, decision.action)
            self._check_holders(decision.action)
        before = self.publication
        self.publication, decision = publication.follow(before, decision, view, now_s)
        self.leader_state = decision.leader_state
        self.decide_again_at_s = decision.again_at_s
        gone = {m.agent for m in decision.asks if self.simulation.probe(m) is False}
        if not gone <= self.gone:
            self.gone |= gone
            self.decided_at_revision = 0
        if before is None and self.publication is not None and self.rng.random() < 0.15:
            self.manifest_stalls_until_s = now_s + self.rng.uniform(1.0, 25.0)
        if before is not None and before.is_under_way:
            self._may_take_manifest_unwatched(before)
        if decision.action is not None:
            self.decided_at_revision = 0
            self._perform(view, decision.action)
        else:
            self._announce()

    def _check_holders(self, action: actions.Action) -> None:
        """Shards that are not rebuilt are with the servers that took them, as the leader knows."""
        resume = action.generation.resume if isinstance(action, actions.Open) else None
        if resume is None:
            return
        rebuilt = {rebuild.rank for rebuild in resume.shard_rebuilds}
        must(
            all(
                self.view.nodes[holder.node].record.server == holder.server
                for holder in resume.holders
                if not rebuilt & set(holder.ranks)
            ),
            "nothing is restored from a server that has been replaced",
        )

    def receive_report(self, report: NodeReport) -> None:
        """Keep a report, and announce what it completes, as `Membership.receive_report`."""
        self.reports.receive(report)
        generation = self.view.generation
        if not self._leads or generation is None or not self.reports.completes(report, generation):
            return
        announced = self._announce()
        now_s, again_at_s = self.simulation.now_s, self.decide_again_at_s
        again_in_s = None if again_at_s is None else again_at_s - now_s
        view = with_reports(self.view, self.reports.newest)
        if announced is None or commits.needs_decision(view, announced, now_s, again_in_s):
            self.decided_at_revision = 0

    def _announce(self) -> SnapshotId | None:
        view = with_reports(self.view, self.reports.newest)
        found = self.announcements.next(view, self.reports, self.simulation.now_s)
        if found is None:
            return None
        if self.announcements.held_until_s is not None:
            self.simulation.note_unasked(found.snapshot)
        self.receive_announcement(found)
        self.simulation.announce(found, self)
        return found.snapshot

    def receive_announcement(self, announcement: CommitAnnouncement) -> None:
        """Keep the newest announcement, as `Participation._receive_announcement`."""
        if self.announced is None or announcement.snapshot > self.announced.snapshot:
            if self.announced is None or self.announced.after <= self.view.revision:
                self.unconfirmed_since_s = self.simulation.now_s
            self.announced = announcement

    @property
    def _leads(self) -> bool:
        return self.mirrors_all and self._led_since() > 0

    def _led_since(self) -> int:
        """The revision at which this membership took the lead; 0 if it has not."""
        return join_protocol.led_since(self.view, self.lease.id) if self.lease is not None else 0

    def _take_lead(self) -> None:
        assert self.written is not None
        attempt = transactions.take_lead(KEYS, self.view, self.written, self.created)
        try:
            self.simulation.coordinator.send(attempt, self.sender)
        except UnknownOutcome:
            return  # The view will show it, or it is tried again.

    def _write_manifest(self) -> None:
        """Go on with the manifest that is under way: storage takes it, refuses it, or lets wait."""
        writing = self.publication
        if writing is None or not writing.is_under_way:
            return
        is_slow = not self.simulation.is_calm and self.rng.random() < 0.6
        if is_slow or self.simulation.now_s < self.manifest_stalls_until_s:
            return
        failure = ""
        try:
            if self.simulation.storage_fails():
                raise StorageError("the storage is away")
            self._store_manifest(writing.action)
        except StorageError as error:
            failure = str(error)
        self.publication = replace(writing, failure=failure)
        self.decided_at_revision = 0

    def _may_take_manifest_unwatched(self, given_up: Publication) -> None:
        """Have storage take, or not, a manifest that this leader does not wait for any more."""
        is_watched = self.publication is not None and self.publication.is_under_way
        if not is_watched and self.rng.random() < 0.5:
            try:
                self._store_manifest(given_up.action)
            except StorageError:
                return

    def _store_manifest(self, action: actions.Publish) -> None:
        if not action.is_stored:
            holders = action.request.commit.holders
            self.simulation.storage.publish(
                action.request.commit.snapshot,
                action.parts,
                sum(holder.nproc for holder in holders),
            )

    def _perform(self, view: View, action: actions.Action) -> None:
        now_s = self.simulation.now_s
        parts = transactions.lead(KEYS, view, self._led_since(), action, now_s)
        invariants.check_transition(view, transactions.preview(KEYS, view, parts))
        self.lead_after = (self.revision, now_s + UNKNOWN_WAIT_S)
        self.announcements.note_sent(action)
        self.is_settled = False
        if isinstance(action, actions.Open):
            self.simulation.check_known_commit(view, action.generation)
            self.simulation.check_held(view, action.generation)
        for part in parts:
            try:
                done = self.simulation.coordinator.send(part, self.sender)
            except UnknownOutcome:
                return
            if not done.succeeded:
                return
        self.lead_at_revision, self.lead_after = done.revision, None
        self.is_settled = True

    def _leave(self, is_connected: bool) -> None:
        """Sign off, as `Membership.leave`; it takes more than one step."""
        coordinator = self.simulation.coordinator
        if not is_connected:
            self.crash()
            return
        if self.removal is None and not self.is_leaving_now:
            self.is_leaving_now = True
            view = coordinator.read()
            if set(view.nodes) <= {self.name}:
                self.removal = transactions.remove_job(KEYS, view, self.name, self.created)
                return
        if self.removal is not None:
            try:
                coordinator.send(self.removal, self.sender)
            except UnknownOutcome:
                pass
        assert self.lease is not None
        coordinator.revoke(self.lease.id)
        self.crash()

    # The agent

    def _update(self, **changes: Any) -> None:
        for name, value in changes.items():
            if getattr(self.record, name) != value:
                self.record = replace(self.record, **changes)
                return

    def _reconcile(self) -> bool:
        """Follow `Agent._reconcile`; True when nothing is left to do but to leave."""
        view, now_s = self.view, self.simulation.now_s
        if self.is_leaving_now or view.result is not None:
            return True
        if self.name in view.evictions and self.leaving_since_s is None:
            self.leaving_since_s = now_s
        if self.leaving_since_s is not None:
            self._update(leaving=True)
            if decide.may_leave(view, self.name):
                return True
            if now_s >= self.leaving_since_s + GRACE_S:
                self.simulation.left_overdue.add(self.name)
                return True
        if self.has_lost_server:
            self.drained_generation = self.worker_generation
            self._start_server()
            if self.rng.random() < 0.5:
                return False  # What the record says by now may be written before the rest.
        self._follow_commits(view)
        self._carry_out_restarts(view)
        while (action := next_action(self.state, view)) and self._carry_out(action):
            pass
        phase = self.state.phase
        times: Mapping[str, float] = {}
        if phase in (NodePhase.RUNNING, NodePhase.DONE):
            times = {"ready": now_s, "restored": now_s, "stepped": now_s}
        has_workers = bool(self.workers)
        self._update(
            failure=self.failure,
            finishing=has_workers and self._has_finished(),
            checkpoint_url="/c" if has_workers else self.record.checkpoint_url,
            checkpoint_every=self.simulation.checkpoint_every,
            phase=phase,
            times=self.record.times or times,
        )
        if phase in (NodePhase.DONE, NodePhase.DRAINED):
            self._update(step=self._step(), committed=self.known_commit, **self._holdings())
        elif self.rng.random() < 0.1:
            self._update(step=self._step())
        if self.worker_generation and phase is not NodePhase.DRAINED:
            self._report(view)
        return False

    def _follow_commits(self, view: View) -> None:
        self._begin_part(view)
        waited_s = self.simulation.now_s - min(self.unconfirmed_since_s, self.answered_s)
        newer = commits.next_commit(
            view,
            self.state.entered,
            self.committed,
            self.announced,
            self.state.ended,
            waited_s,
        )
        if newer is not None:
            if self.secret == self.simulation.view.secret:
                self.simulation.check_commit(newer)
            is_seen = self.announced is None or self.announced.after <= view.revision
            if not is_seen and waited_s >= commits.HOLD_S:
                self.simulation.note_unasked(newer)
            self._commit(newer)
            self._withdraw_freed()

    def _withdraw_freed(self) -> None:
        """Keep the record of a node without a place true, as `NodeSnapshots` does."""
        held = self._holdings()
        if self.record.generation != self.state.entered and not (
            set(self.record.sealed) <= set(held["sealed"])
        ):
            self._update(**held)

    @property
    def state(self) -> NodeState:
        """The state that production decides from."""
        workers = Workers(
            generation=self.worker_generation,
            present=bool(self.workers),
            done=self._is_done(self.view),
            running=self.record.phase is not NodePhase.WAITING,
            failure=self.failure,
            awaits_abort_order=self.simulation.awaits_abort_order,
        )
        return NodeState(
            record=self.record,
            workers=workers,
            drained=self.drained_generation,
            ordered=self.ordered_generation,
            paused=self.paused_generation,
        )

    @property
    def has_drained(self) -> bool:
        """Whether no worker of the newest generation writes any more, or there never was one."""
        return self.drained_generation >= self.worker_generation

    @property
    def known_commit(self) -> SnapshotId | None:
        """The newest snapshot of the generation that the node knows to be committed."""
        known = self.committed
        is_own = known is not None and known.generation == self.worker_generation
        return known if known is not None and is_own and known.step >= 0 else None

    def _begin_part(self, view: View) -> None:
        attempt = checkpoint_schedule.next_part(view, self.server, self.state.entered, self.attempt)
        if attempt is None:
            return
        self.attempt = attempt
        try:
            self.memory.pin(attempt.request.commit.snapshot)
        except SnapshotUnavailable as error:
            self._end_part(attempt, {"error": str(error)})
        else:
            self.part_writes.append(PartWrite(attempt))

    def _commit(self, snapshot: SnapshotId) -> None:
        self.committed = snapshot
        self.memory.commit(snapshot)

    def _enter(self, generation: Generation) -> None:
        self.memory.abandon_begun()
        self.memory.open_generation(generation.generation)
        for write in self.part_writes:
            write.stopped = True
        resume = generation.resume
        self._commit(resume.snapshot if resume else SnapshotId(generation.generation, -1))
        self.worker_generation, self.failure = generation.generation, None
        self.workers = {}
        if resume is not None:
            for rebuild in resume.shard_rebuilds:
                if rebuild.node == self.name:
                    try:
                        self.memory.adopt(resume.snapshot, rebuild.rank)
                    except SnapshotUnavailable:
                        pass  # It holds the shard already.
        member = generation.member(self.name)
        if member is None:
            return
        step = resume.snapshot.step if resume else self.simulation.step_in_storage(generation)
        self.workers = dict.fromkeys(member.ranks, SnapshotId(generation.generation, step))
        self._update(
            generation=generation.generation,
            phase=NodePhase.STARTING,
            failure=None,
            finishing=False,
            persisted=None,
            times={},
            step=step,
            committed=None,
            **self._holdings(),
        )

    def _carry_out_restarts(self, view: View) -> None:
        for request in due_restarts(self.state, view):
            if self.drained_generation != self.worker_generation:
                self._fail(f"rank {request.rank} was restarted")
            transaction = transactions.complete_restart(
                KEYS, view, self.name, self.created, request
            )
            # The view shows the request until it is gone; meanwhile it may be completed again.
            if self.rng.random() < 0.5:
                self.simulation.delay(transaction, self.sender)
                continue
            try:
                self.simulation.coordinator.send(transaction, self.sender)
            except UnknownOutcome:
                continue

    def fail_worker(self) -> None:
        """Have a worker crash."""
        if self.workers and self.drained_generation != self.worker_generation:
            self._fail("killed")

    def lose_server(self) -> None:
        """Have the snapshot server die; the agent replaces it."""
        self.simulation.servers.pop(self.server, None)
        self.memory = Memory()
        self.part_writes = []
        self.has_lost_server = True
        self._fail("the snapshot server died")

    def _fail(self, message: str) -> None:
        self.memory.abandon_begun()
        self.failure = self.failure or Failure(
            FailureKind.WORKER, message, self.simulation.now_s, next(iter(self.workers), None)
        )

    def _carry_out(self, action: Action) -> bool:
        """Carry out an action, or let it wait; return whether to go on with the next one."""
        match action:
            case Enter(generation):
                self._enter(generation)
                return False
            case Fence(number):
                self.memory.fence(number)
                self._update(fenced=number, committed=self.known_commit)
            case OrderAbort(number):
                self.simulation.aborted.add(number)
                self.ordered_generation = number
            case Drain(number, abort):
                return self._drain(number, abort)
            case EndPaused(number):
                self.paused_generation = number
                self._update(step=self._step())
                self.workers = {}
        return True

    def _drain(self, generation: int, abort: bool) -> bool:
        """Have the workers drain, unless they take longer; return whether they have."""
        if not abort and self.rng.random() < 0.5:
            return False  # Its ranks take a last snapshot first.
        waits = abort and self.simulation.awaits_abort_order
        if waits and self.ordered_generation != generation and self.rng.random() >= 0.05:
            return False  # They wait for the order; sometimes they are killed.
        self.memory.abandon_begun()
        self._verify()
        self.drained_generation = generation
        self._update(committed=self.known_commit, **self._holdings())
        return True

    def _verify(self) -> None:
        """Sometimes forget the newest snapshot, whose memory has changed since it was sealed."""
        newest = max(self.memory.sealed(RANKS), default=None)
        if newest is not None and not self.simulation.is_calm and self.rng.random() < 0.03:
            self.memory.discard(newest)

    def _step(self) -> int:
        return max((state.step for state in self.workers.values()), default=self.record.step)

    def _has_finished(self) -> bool:
        return self.last_step is not None and all(
            state.step >= self.last_step for state in self.workers.values()
        )

    def _is_done(self, view: View) -> bool:
        """Whether the workers have exited: they wait until their last step is stored."""
        if self.record.phase is NodePhase.DONE:
            return True
        stored = view.checkpoint.step if view.checkpoint is not None else 0
        return self._has_finished() and self.last_step is not None and stored >= self.last_step

    def _holdings(self) -> dict[str, tuple[SnapshotId, ...]]:
        """Return what the server tells its agent: what is sealed, and what has its parity."""
        sealed = self.memory.sealed(RANKS)
        protected = [s for s in sealed if self.memory.pulled.get(s, set()) >= self.peers(s)]
        return {"sealed": tuple(sorted(sealed)), "protected": tuple(sorted(protected))}

    def _report(self, view: View) -> None:
        if view.leadership is None:
            return
        address = view.leadership.agent
        report = NodeReport(
            node=self.name,
            lease=self.record.lease,
            generation=self.record.generation,
            server=self.server,
            step=self._step(),
            protected=self._holdings()["protected"],
        )
        if (address, report) == self.reported:
            return
        # A report that is lost is sent again once the connection is back.
        is_sent = self.simulation.is_calm or self.rng.random() < 0.8
        is_heard = self.simulation.is_heard(self) or address == self.agent
        if is_sent and is_heard and self.simulation.deliver(report, address):
            self.reported = (address, report)

    # Workers and the snapshot server

    def work(self) -> None:
        """Have a worker and the snapshot server go on for a while, whatever the agent does."""
        if self.worker_generation and self.workers and self.failure is None:
            is_over = self.drained_generation == self.worker_generation
            if self.simulation.now_s < self.simulation.paused_until_s:
                is_over = True
            if not is_over and not (self.last_step is not None and self._has_finished_snapshots()):
                for _ in range(2 * RANKS):
                    self._train()
        if self.rng.random() < 0.6 or self.simulation.is_calm:
            self._pull()
        if self.part_writes and (self.simulation.is_calm or self.rng.random() < 0.5):
            self._continue_part(self.part_writes[0])

    def _has_finished_snapshots(self) -> bool:
        return self._has_finished() and all(
            self.memory.content(state, rank) is not None for rank, state in self.workers.items()
        )

    def _train(self) -> None:
        """Have one rank begin or seal a snapshot, if it knows that its last one is committed."""
        rank = self.rng.choice(list(self.workers))
        state = self.workers[rank]
        try:
            if (state, rank) in self.memory.begun:
                is_aborted = self.worker_generation in self.simulation.aborted
                seal = self.memory.seal_garbage if is_aborted else self.memory.seal
                seal(state, rank)
                return
            following = self._following(rank, state)
            is_sealed = self.memory.content(following, rank) is not None
            if is_sealed and self.rng.random() < 0.9:
                return
            self.memory.begin(following, rank)
            self.workers[rank] = following
        except SnapshotUnavailable:
            pass  # The last one is not committed yet, or the generation is over.

    def _following(self, rank: int, state: SnapshotId) -> SnapshotId:
        """Return which snapshot a rank takes next: all ranks take every one, after a resume first
        that of the step that they resumed from."""
        committed = self.committed
        is_new = committed is None or committed.generation < state.generation
        known = -1 if is_new or committed is None else committed.step
        is_taken = (state, rank) in self.memory.table.shards
        waits = state.step > max(known, 0) or (is_new and state.step > 0 and not is_taken)
        if waits or (self.last_step is not None and state.step >= self.last_step):
            return state
        return SnapshotId(state.generation, state.step + 1)

    def peers(self, snapshot: SnapshotId) -> set[str]:
        """Return the servers whose blocks the parity of a snapshot is made of."""
        generation = self.simulation.opened.get(snapshot.generation)
        if generation is None or not generation.parity:
            return set()
        group = group_of(generation.members, self.name)
        return {member.server for member in group if member.node != self.name}

    def _pull(self) -> None:
        """Fetch one block for the parity of a snapshot, if the server that has it is reached."""
        for snapshot in sorted(self.memory.sealed(RANKS)):
            if snapshot.generation != self.memory.table.generation:
                continue
            missing = self.peers(snapshot) - self.memory.pulled.setdefault(snapshot, set())
            for server in self.rng.sample(sorted(missing), min(1, len(missing))):
                peer = self.simulation.servers.get(server)
                if peer is not None and snapshot in peer.memory.sealed(RANKS):
                    self.memory.pulled[snapshot].add(server)
                    if peer.memory.is_spoilt(snapshot):
                        self.memory.garbage.setdefault(snapshot, set()).add(server)

    def _continue_part(self, write: PartWrite) -> None:
        """End the write of a part: written, failed, or given up."""
        self.part_writes.remove(write)
        commit = write.attempt.request.commit
        snapshot = commit.snapshot
        holder = next(holder for holder in commit.holders if holder.server == self.server)
        part: Mapping[str, object]
        try:
            if write.stopped:
                raise StorageError("the attempt was given up, its generation is over")
            if self.simulation.storage_fails():
                raise StorageError("the storage is away")
            shards = [self.memory.content(snapshot, rank) for rank in holder.ranks]
            if None in shards:
                raise StorageError("a shard is not held here")
            part = self.simulation.storage.write_part(
                snapshot, [shard for shard in shards if shard is not None]
            )
        except StorageError as error:
            part = {"error": str(error)}
        self.memory.unpin(snapshot)
        self._end_part(write.attempt, part)

    def _end_part(self, attempt: PartAttempt, part: Mapping[str, object]) -> None:
        """Let the agent know what has become of a part."""
        if self.is_member and attempt == self.attempt:
            self._update(persisted=attempt.answer(part))
