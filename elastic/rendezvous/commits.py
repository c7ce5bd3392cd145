"""Decides what is announced as committed, who believes it, and when the coordinator is told. Pure.

A snapshot is committed once every member of its generation protects it. The leader announces that
to the agents directly. The coordinator is told seldom: which snapshot is the newest is decided from
the members' own records when their generation closes, and these are written anyway.

Invariants:
- What is announced was reported as protected by every member of its generation.
- A node believes no announcement of a generation in which it is fenced or has drained, so that what
  its record says then stays true.
- A node frees nothing that it is asked to store before it has begun to: an announcement counts once
  the node sees the request that stood when it was made. The exception is a coordinator that has not
  answered the writer of the request, or has not shown it to the node, for seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.actions import Action, Commit, Persist
from keepstep.elastic.rendezvous.checkpoint_schedule import begin_persist_if_due
from keepstep.elastic.rendezvous.rank_assignment import present_members
from keepstep.elastic.rendezvous.records import (
    CommitAnnouncement,
    Generation,
    NodeRecord,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.reports import Reports
from keepstep.elastic.rendezvous.view import View

_CLOCK_TOLERANCE_S = 0.1
"""Two clocks that are read one after the other differ from one time to the next."""

HOLD_S = 2.0
"""How long a commit waits for a request to store, at most: to be announced, and to be believed.

Less than what is left of a lease that was not renewed the last time.
"""

COMMIT_INTERVAL_S = 5.0
"""How often the coordinator is told of a commit that nobody needs there, at most."""


class Announcements:
    """What a leader has announced, and whether it may announce more."""

    def __init__(self) -> None:
        self._last: CommitAnnouncement | None = None
        self._sent: Persist | Commit | None = None
        """The action that the view does not show yet, if a request to store may follow from it."""
        self._held_since_s: float | None = None
        """Since when a commit is held back for a request to store, in wall-clock seconds."""
        self._answered_s = math.inf
        """When the coordinator was last asked for what it has answered; infinity: not known."""

    def next(self, view: View, reports: Reports, wall_s: float) -> CommitAnnouncement | None:
        """Return what the leader announces now; None if there is nothing new.

        In a generation that closes, commits go through the coordinator: whoever opens the next one
        has to see them.

        A commit frees what is to be stored, so it is held back until that is asked for; but not
        for longer than a coordinator takes that answers, nor while it has answered nothing for as
        long. In an outage nodes would else protect nothing newer, and all leases may end with it. A
        request that comes too late fails, and is made again for a newer snapshot.

        Args:
            view: the leader's view, with the reports folded in.
            reports: what members have reported to it.
            wall_s: wall-clock seconds.
        """
        if view.generation is None or view.is_closing or view.result is not None:
            return None
        newest = reports.protected_by_all(view.generation)
        if newest is None or (self._last is not None and newest <= self._last.snapshot):
            return None
        if self._is_held_back(view, view.generation, wall_s):
            return None
        self._last = CommitAnnouncement(newest, view.revisions.get("persist", 0))
        return self._last

    @property
    def held_until_s(self) -> float | None:
        """When what is held back is to be announced, in wall-clock seconds; None if nothing is.

        No report need come before: ranks wait for the announcement.
        """
        if self._held_since_s is None:
            return None
        return min(self._held_since_s, self._answered_s) + HOLD_S

    def note_answer(self, asked_s: float) -> None:
        """Note that the coordinator has answered what it was asked then, in wall-clock seconds."""
        self._answered_s = asked_s

    def note_sent(self, action: Action) -> None:
        """Note that an action is sent: it may be applied later than its writer learns."""
        if isinstance(action, Persist | Commit):
            self._sent = action

    def note_shown(self) -> None:
        """Note that the view shows the newest action: none that was sent before comes any more."""
        self._sent = None

    def _is_held_back(self, view: View, generation: Generation, wall_s: float) -> bool:
        if view.persist is not None or not self._may_be_asked_for(view, generation, wall_s):
            self._held_since_s = None
            return False
        if self._held_since_s is None or wall_s < self._held_since_s:
            self._held_since_s = wall_s
        return self.held_until_s is not None and wall_s < self.held_until_s

    def _may_be_asked_for(self, view: View, generation: Generation, wall_s: float) -> bool:
        """Whether a request to store what the next announcement frees is due, or on its way."""
        if isinstance(self._sent, Persist):
            return True
        committed = [view.snapshot, self._sent.commit if self._sent is not None else None]
        present = present_members(view, generation)
        return any(
            begin_persist_if_due(replace(view, snapshot=commit), present, wall_s) is not None
            for commit in committed
            if commit is not None
        )


def needs_decision(
    view: View, announced: SnapshotId, wall_s: float, decides_in_s: float | None
) -> bool:
    """Whether a leader that has announced a snapshot has to decide at once, and not later.

    It does not if all that is left is to tell the coordinator of it, and the leader decides again
    when that is due.

    Args:
        view: the leader's view, with the reports folded in.
        announced: the snapshot.
        wall_s: wall-clock seconds.
        decides_in_s: in how many seconds the leader decides again whatever comes; None: never.
    """
    generation, known = view.generation, view.snapshot
    if generation is None or known is None or decides_in_s is None:
        return True
    if decides_in_s > known.at_s + COMMIT_INTERVAL_S - wall_s + _CLOCK_TOLERANCE_S:
        return True
    commit = SnapshotCommit(announced, generation.members, generation.parity)
    return is_due(view, commit, present_members(view, generation), wall_s)


def next_commit(
    view: View,
    entered: int,
    known: SnapshotId | None,
    announced: CommitAnnouncement | None = None,
    ended: int = 0,
    waited_s: float = 0.0,
) -> SnapshotId | None:
    """Return the committed snapshot of which a node's server and workers are to be informed.

    A commit frees everything older, which a request of its generation may be about to store: a node
    begins its part first, and for that it has to enter the generation.

    Args:
        view: the node's view.
        entered: the generation that the node has entered.
        known: the snapshot of which they were informed last.
        announced: the newest announcement that has come.
        ended: the newest generation in which the node is fenced or has drained.
        waited_s: for how long announcements have come that the view does not confirm, or the
            coordinator has answered nothing, if that is longer. It is not waited for longer than a
            coordinator takes that answers: all ranks wait for this node.
    """
    if entered != view.generation_number:
        return None
    committed = [view.snapshot.snapshot] if view.snapshot is not None else []
    if (
        announced is not None
        and announced.snapshot.generation == entered > ended
        and (announced.after <= view.revision or waited_s >= HOLD_S)
    ):
        committed.append(announced.snapshot)
    newest = max(committed, default=None)
    return newest if newest is not None and (known is None or newest > known) else None


def commit_of(view: View, generation: Generation, present: Sequence[NodeRecord]) -> Commit | None:
    """Return the commit of the newest snapshot that all members protect; None if it is not new.

    Args:
        view: what the coordinator holds.
        generation: whose snapshots count.
        present: the records of its members that are present.
    """
    if len(present) < len(generation.members):
        return None
    common = set.intersection(*(set(record.protected) for record in present)) if present else set()
    fresh = [s for s in common if s.generation == generation.generation]
    newest = max(fresh, default=None)
    if newest is None or (view.snapshot is not None and newest <= view.snapshot.snapshot):
        return None
    return Commit(SnapshotCommit(newest, generation.members, generation.parity))


def is_due(
    view: View, commit: SnapshotCommit, present: Sequence[NodeRecord], wall_s: float
) -> bool:
    """Whether the coordinator is told of a commit now.

    That is the first of a generation, which lets holders of older ones go; one that is to be
    stored; the last one; and from time to time any, for those who watch the job.
    """
    known = view.snapshot
    if known is None or known.snapshot.generation < commit.snapshot.generation:
        return True
    if not known.at_s <= wall_s < known.at_s + COMMIT_INTERVAL_S:
        return True
    if any(record.finishing for record in present):
        return True
    return (
        view.persist is None
        and begin_persist_if_due(replace(view, snapshot=commit), present, wall_s) is not None
    )
