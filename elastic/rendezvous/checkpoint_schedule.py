"""When a committed snapshot is brought to storage, and how far that is: the leader's decisions about checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.elastic.rendezvous.actions import Action, CancelPersist, Commit, Persist, Publish
from keepstep.elastic.rendezvous.intervals import AUTO, checkpoint_interval_s
from keepstep.elastic.rendezvous.rank_assignment import absent_holders
from keepstep.elastic.rendezvous.records import NodeRecord, PersistRequest, SnapshotCommit
from keepstep.elastic.rendezvous.view import View


def begin_persist_if_due(
    view: View, present: Sequence[NodeRecord], wall_s: float
) -> Persist | None:
    """Begin to store the committed snapshot if it is time to.

    That is every so many steps, or (`AUTO`) when the best interval has passed since the last, and at the end. Without a
    checkpoint yet its cost is not known: the first is stored at once.
    """
    if view.snapshot is None or absent_holders(view, view.snapshot):
        return None
    urls = {record.checkpoint_url for record in present if record.checkpoint_url}
    if len(urls) != 1:
        return None
    step = view.snapshot.snapshot.step
    stored = view.checkpoint.step if view.checkpoint else 0
    every = next(
        (record.checkpoint_every for record in present if record.checkpoint_every is not None), None
    )
    finishing = all(record.finishing for record in present) and step == max(r.step for r in present)
    if view.store_failure is not None and view.store_failure.step >= step:
        return None
    if every == AUTO:
        is_due = view.checkpoint is None or wall_s >= view.checkpoint.at_s + checkpoint_interval_s(
            view, wall_s
        )
    else:
        is_due = every is not None and step // every > stored // every
    if step > stored and (is_due or finishing):
        return Persist(PersistRequest(view.snapshot, urls.pop(), wall_s))
    return None


def continue_persist(view: View, request: PersistRequest) -> Publish | CancelPersist | None:
    """Go on with what is being stored once all holders have written their parts, or one has failed to."""
    wanted = request.commit.snapshot
    parts = []
    for holder in request.commit.holders:
        joined = view.nodes.get(holder.node)
        part = joined.record.persisted if joined else None
        if part is None or (part.step, part.generation) != (wanted.step, wanted.generation):
            return None
        if "error" in part.part:
            reason = f"{holder.node} could not write step {part.step} to {request.url}: {part.part['error']}"
            return CancelPersist(request, reason)
        parts.append(part.part)
    return Publish(request, tuple(parts))


def persist_before_leaving(
    view: View, present: Sequence[NodeRecord], resume: SnapshotCommit | None
) -> Action | None:
    """Bring the newest snapshot to storage while its holders are still here, for there may be nobody to hand it to."""
    if (
        resume is None
        or absent_holders(view, resume)
        or not any(record.leaving for record in present)
    ):
        return None
    if view.snapshot != resume:
        return Commit(resume)
    if view.persist is not None:
        return continue_persist(view, view.persist)
    urls = {record.checkpoint_url for record in present if record.checkpoint_url}
    stored = view.checkpoint.step if view.checkpoint else 0
    failed = view.store_failure.step if view.store_failure else 0
    if len(urls) == 1 and resume.snapshot.step > max(stored, failed):
        return Persist(PersistRequest(resume, urls.pop()))
    return None
