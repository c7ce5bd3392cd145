"""Tells a node's snapshot server and workers what is committed and stored, and the leader of both.

The server learns what is committed and what it is to store; the workers, what is committed and
stored; the leader, what the server has protected or stored, or has failed to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.messages import (
    AlreadyStored,
    Persisted,
    PersistFailed,
    Protected,
    RestoreChecked,
)
from keepstep.elastic.agent.local_node import LocalNode
from keepstep.elastic.agent.server_supervisor import ServerSupervisor
from keepstep.elastic.agent.snapshot_process import (
    ServerDied,
    SnapshotEvent,
    SnapshotProcess,
    stored_part,
)
from keepstep.elastic.agent.state_directory import StateDirectory
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.rendezvous.actions import Publish
from keepstep.elastic.rendezvous.checkpoint_schedule import PartAttempt, is_over, next_part
from keepstep.elastic.rendezvous.commits import HOLD_S, next_commit
from keepstep.elastic.rendezvous.kept_state import (
    KeptState,
    is_news,
    record_to_go_on,
    view_to_go_on,
    view_to_keep,
)
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    NodeRecord,
    NodeReport,
    RestoreComparison,
    decode_secret,
)
from keepstep.elastic.rendezvous.view import View
from keepstep.elastic.worker.messages import SnapshotCommitted

log = logging.getLogger("keepstep")


class NodeSnapshots:
    """The snapshots of one node, over all its memberships and snapshot servers.

    Args:
        node: whose they are.
        on_change: called when something has changed that the node acts on.

    Attributes:
        supervisor: keeps the server running.
    """

    def __init__(self, node: LocalNode, on_change: Callable[[], None]) -> None:
        self._node = node
        self._on_change = on_change
        self.supervisor = ServerSupervisor(node.config, self._on_event, on_change)
        self._committed: SnapshotId | None = None
        self._announced: CommitAnnouncement | None = None
        self._unconfirmed_since_s = 0.0
        """When the first came that the view has not confirmed since, in monotonic seconds."""
        self._part_attempt: PartAttempt | None = None
        self._kept: KeptState | None = None
        self._has_failed_to_keep = False

    @property
    def server(self) -> SnapshotProcess:
        """The server that was started last."""
        return self.supervisor.server

    async def start(self, secret: bytes) -> None:
        """Start a server for the run of the job that has this secret.

        Raises:
            JobFailed: it does not start.
        """
        self._announced = None
        await self.supervisor.start(secret)
        self._adopt()

    async def replace(self) -> None:
        """Start a server after one that died; what it held is lost on this node.

        Raises:
            JobFailed: it does not start.
        """
        await self.supervisor.replace()
        self._adopt()
        self._node.membership.update(sealed=(), protected=(), persisted=None)

    async def attach(self, directory: StateDirectory, kept: KeptState) -> View:
        """Go on with the server that the node's last agent has left; return its view of the job.

        The workers of that agent seal nothing more.

        Raises:
            SnapshotUnavailable: the server has ended, or does not answer.
        """
        await self.supervisor.attach(directory, decode_secret(kept.secret.encode()))
        newest = max(kept.record.generation, kept.view.generation_number)
        await self.server.fence(newest)
        self._node.drained = newest
        return view_to_go_on(kept.view)

    async def verify_attached(self, own: NodeRecord, kept: NodeRecord) -> NodeRecord:
        """Return this agent's record with what an attached server holds undamaged.

        Raises:
            SnapshotUnavailable: the server has ended, or does not answer.
        """
        server = self.server
        await server.verify()
        self._committed = server.committed
        return record_to_go_on(
            own, kept, server.address, server.sealed, server.protected, server.committed
        )

    def keep(self, *, is_final: bool = False) -> None:
        """Write what the next agent of this node needs, where that has changed.

        Args:
            is_final: nobody goes on with the job from here on, until somebody starts it again.
        """
        config, view = self._node.config, self._node.membership.held
        directory = self.supervisor.directory
        if not config.keeping.keep_s or directory is None or view is None or view.secret is None:
            return
        record, kept_view = self._node.membership.record, view_to_keep(view)
        kept = KeptState(
            place=config.keeping.place,
            line=config.keeping.line,
            job=config.job,
            secret=view.secret.decode(),
            record=record,
            view=replace(kept_view, pause=None) if is_final else kept_view,
            may_restore=is_final or config.serves_coordinator,
        )
        if is_final or self._kept is None or is_news(self._kept, kept):
            try:
                directory.write(kept)
            except OSError as error:
                if not self._has_failed_to_keep:
                    log.warning("what is in memory is not kept for the next agent: %s", error)
                self._kept, self._has_failed_to_keep = None, True
            else:
                self._kept, self._has_failed_to_keep = kept, False

    def _adopt(self) -> None:
        """Announce a new server, to which nothing has been passed on yet."""
        self._committed, self._part_attempt, self._kept = None, None, None
        self._node.membership.update(server=self.server.address)

    @property
    def are_kept(self) -> bool:
        """Whether the next agent of this node would find what is in memory."""
        return self._kept is not None

    @property
    def due_s(self) -> float | None:
        """When an announcement counts that the view does not confirm, in monotonic seconds."""
        announced, known = self._announced, self._committed
        if announced is None or announced.after <= self._node.membership.view.revision:
            return None
        is_recorded = known is not None and announced.snapshot <= known
        due_s = self._waits_since_s + HOLD_S
        return None if is_recorded or due_s <= time.monotonic() else due_s

    @property
    def _waits_since_s(self) -> float:
        """Since when the view is waited for to confirm announcements, in monotonic seconds."""
        return min(self._unconfirmed_since_s, self._node.membership.answered_s)

    @property
    def _announced_commit(self) -> SnapshotId | None:
        """The newest snapshot of the generation that is known here to be committed."""
        known = self._committed
        is_own = known is not None and known.generation == self._node.worker_group.generation
        return known if known is not None and is_own and known.step >= 0 else None

    def record(self, **changes: Any) -> None:
        """Bring up to date what the node's record says of snapshots, with other fields."""
        self._node.membership.update(
            sealed=self.server.sealed,
            protected=self.server.protected,
            committed=self._announced_commit,
            **changes,
        )

    async def fence(self, generation: int) -> None:
        """Have nothing more sealed of a generation, and record that."""
        await self.server.fence(generation)
        self._node.membership.update(fenced=generation, committed=self._announced_commit)

    async def follow(self) -> None:
        """Pass on what has been committed and stored, and begin to write what is to be stored."""
        view = self._node.membership.view
        self.keep()
        # A commit frees what older requests are to store: those begin first.
        attempt = next_part(view, self.server.address, self._node.state.entered, self._part_attempt)
        if attempt is not None:
            self._part_attempt = attempt
            await self.server.persist(attempt)
        elif self._part_attempt is not None and is_over(view, self._part_attempt):
            ended, self._part_attempt = self._part_attempt, None
            await self.server.end_persist(ended)
        newer = next_commit(
            view,
            self._node.state.entered,
            self._committed,
            self._announced,
            self._node.state.ended,
            time.monotonic() - self._waits_since_s,
        )
        if newer is not None:
            await self.commit(newer)
            self._withdraw_freed()
        # Looked at whenever a worker has joined, too: it waits for the last step to be stored.
        stored = view.checkpoint
        await self._node.worker_group.tell_stored(
            stored.step if stored else -1, stored.generation if stored else 0
        )

    def _withdraw_freed(self) -> None:
        """Have the record of a node without a place name nothing that its server has freed.

        No report says so, as one of a member does, and a leader that takes the lead now would
        count on this node.
        """
        record, held = self._node.membership.record, self.server.sealed
        if record.generation != self._node.state.entered and not set(record.sealed) <= set(held):
            self._node.membership.update(sealed=held, protected=self.server.protected)

    async def commit(self, snapshot: SnapshotId) -> None:
        """Tell the server and the workers that a snapshot is committed."""
        self._committed = snapshot
        await self.server.commit(snapshot)
        await self._node.worker_group.broadcast(SnapshotCommitted(step=snapshot.step))

    def announce(self, announcement: CommitAnnouncement) -> None:
        """Tell all members, this node's own workers included, what is committed."""
        self._node.connections.announce(announcement)
        self.receive_announcement(announcement)

    def receive_announcement(self, announcement: CommitAnnouncement) -> None:
        """Note what a leader has found committed."""
        known = self._announced
        if known is None or announcement.snapshot > known.snapshot:
            if known is None or known.after <= self._node.membership.view.revision:
                self._unconfirmed_since_s = time.monotonic()
            self._announced = announcement
            self._on_change()

    def _on_event(self, event: SnapshotEvent) -> None:
        """Pass on what the snapshot server has protected or stored, or has failed to."""
        match event:
            case Protected():
                self.report()
            case RestoreChecked():
                self._note_restore(event)
            case Persisted() | AlreadyStored() | PersistFailed():
                attempt = self._part_attempt
                # An earlier attempt may end after the next one has begun.
                if attempt is not None and event.attempt == attempt.name:
                    self._node.membership.update(persisted=attempt.answer(stored_part(event)))
            case ServerDied():
                self._node.worker_group.fail(
                    f"the snapshot server of {self._node.config.node} died"
                )
        self._on_change()

    def _note_restore(self, checked: RestoreChecked) -> None:
        """Record how what was restored compares; if it is wrong, restore again."""
        step = checked.snapshot.step
        if checked.snapshot.generation != self._node.worker_group.generation:
            return
        self._node.membership.update(
            restore_comparison=RestoreComparison(step, checked.nbytes, checked.differing)
        )
        if checked.differing:
            wrong = (
                f"the state restored at step {step} differs from the snapshot in "
                f"{', '.join(checked.differing)}"
            )
            log.error("%s", wrong)
            if checked.is_wrong:
                self._node.worker_group.fail(wrong)

    def report(self) -> None:
        """Report to the leader what is protected here."""
        record = self._node.membership.record
        protected = self.server.protected
        if self._node.drained == record.generation:
            # Once it has drained the leader goes by the record: others may still wait for this
            # snapshot's commit.
            self._node.membership.update(sealed=self.server.sealed, protected=protected)
            return
        report = NodeReport(
            node=record.node,
            lease=record.lease,
            generation=record.generation,
            server=self.server.address,
            step=self._node.worker_group.step,
            protected=protected,
        )
        self._node.membership.receive_report(report)
        if not self._node.membership.leads:
            self._node.connections.report(report)

    async def publish(self, action: Publish) -> None:
        """Have the manifest of a checkpoint written, whose parts are all stored.

        Raises:
            JobFailed: it was not written.
        """
        if action.is_stored:
            return
        attempt = PartAttempt(action.request, action.revision)
        try:
            await self.server.publish(attempt, action.parts)
        except SnapshotUnavailable as error:
            raise JobFailed(str(error)) from error
