"""Decides which commits are announced, believed, and written to the coordinator. Pure.

A snapshot is committed once every member of its generation protects it. The leader announces that
to the agents directly. It is seldom written to the coordinator: when a generation closes, the
newest snapshot is decided from the members' own records, which are written anyway.

Invariants:
- Every member of its generation has reported an announced snapshot as protected.
- A node believes no announcement of a generation in which it is fenced or has drained, so that its
  record stays true from then on.
- A node frees nothing that it is asked to store before it has begun to store it: an announcement
  counts once the node sees the request that stood when it was made. The exception is a coordinator
  that has not answered the writer of the request, or has not shown it to the node, for seconds.
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
"""The difference between two clocks that are read one after the other varies by this much."""

HOLD_S = 2.0
"""Longest time that a commit waits for a request to store, both to be announced and to be believed.

It is less than the rest of a lease that was not renewed the last time.
"""

COMMIT_INTERVAL_S = 5.0
"""Shortest interval between commits that are written to the coordinator for observers only."""


class Announcements:
    """A leader's announcements, and whether it may make more."""

    def __init__(self) -> None:
        self._last: CommitAnnouncement | None = None
        self._sent: Persist | Commit | None = None
        """The action that the view does not show yet, if a request to store may follow from it."""
        self._held_since_s: float | None = None
        """Since when a commit is held back for a request to store, in wall-clock seconds."""
        self._answered_s = math.inf
        """When the coordinator's last answered request was sent; infinity: not known."""

    def next(self, view: View, reports: Reports, wall_s: float) -> CommitAnnouncement | None:
        """Return the leader's next announcement; None if there is nothing new.

        In a generation that closes, commits go through the coordinator: the leader that opens the
        next one has to see them.

        A commit frees the snapshot to be stored, so it is held back until that is requested. It is
        not held back for longer than a working coordinator takes, nor while the coordinator has
        answered nothing for as long. In an outage nodes would otherwise protect nothing newer, and
        all leases may end with it. A request that comes too late fails, and is made again for a
        newer snapshot.

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
        """When to announce a commit that is held back, in wall-clock seconds; None without one.

        It does not depend on another report: ranks wait for the announcement.
        """
        if self._held_since_s is None:
            return None
        return min(self._held_since_s, self._answered_s) + HOLD_S

    def note_answer(self, asked_s: float) -> None:
        """Note that the coordinator has answered a request of this time, in wall-clock seconds."""
        self._answered_s = asked_s

    def note_sent(self, action: Action) -> None:
        """Note that an action is sent: it may be applied later than its writer learns."""
        if isinstance(action, Persist | Commit):
            self._sent = action

    def note_shown(self) -> None:
        """Note that the view shows the newest action: no earlier one comes any more."""
        self._sent = None

    def _is_held_back(self, view: View, generation: Generation, wall_s: float) -> bool:
        if view.persist is not None or not self._may_be_asked_for(view, generation, wall_s):
            self._held_since_s = None
            return False
        if self._held_since_s is None or wall_s < self._held_since_s:
            self._held_since_s = wall_s
        return self.held_until_s is not None and wall_s < self.held_until_s

    def _may_be_asked_for(self, view: View, generation: Generation, wall_s: float) -> bool:
        """Whether a request to store the snapshot that the next announcement frees is due or
        pending."""
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

    It does not if only the write to the coordinator is left, and the leader decides again when that
    is due.

    Args:
        view: the leader's view, with the reports folded in.
        announced: the snapshot.
        wall_s: wall-clock seconds.
        decides_in_s: seconds until the leader decides again in any case; None: never.
    """
    generation, recorded = view.generation, view.snapshot
    if generation is None or recorded is None or decides_in_s is None:
        return True
    if decides_in_s > recorded.at_s + COMMIT_INTERVAL_S - wall_s + _CLOCK_TOLERANCE_S:
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
    """Return the committed snapshot to pass on to a node's server and workers.

    A commit frees everything older, including a snapshot that a request of its generation may be
    about to store. A node begins its part first, and for that it has to enter the generation.

    Args:
        view: the node's view.
        entered: the generation that the node has entered.
        known: the snapshot that was passed on last.
        announced: the newest announcement that has come.
        ended: the newest generation in which the node is fenced or has drained.
        waited_s: how long announcements have come that the view does not confirm, or the
            coordinator has not answered, if that is longer. The node waits no longer than a working
            coordinator takes: all ranks wait for this node.
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
        view: the coordinator's content.
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
    """Whether a commit is written to the coordinator now.

    These are the first of a generation, which releases holders of older ones; one that is to be
    stored; the last one; and from time to time any, for observers of the job.
    """
    recorded = view.snapshot
    if recorded is None or recorded.snapshot.generation < commit.snapshot.generation:
        return True
    if not recorded.at_s <= wall_s < recorded.at_s + COMMIT_INTERVAL_S:
        return True
    if any(record.finishing for record in present):
        return True
    return (
        view.persist is None
        and begin_persist_if_due(replace(view, snapshot=commit), present, wall_s) is not None
    )
