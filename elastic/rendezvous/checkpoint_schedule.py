"""Decides when a snapshot is stored, which parts holders write, and when it is published. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.elastic.rendezvous.actions import (
    Action,
    CancelPersist,
    Commit,
    Persist,
    Publish,
    RecordLoaded,
)
from keepstep.elastic.rendezvous.intervals import AUTO, checkpoint_interval_s
from keepstep.elastic.rendezvous.rank_assignment import absent_holders
from keepstep.elastic.rendezvous.records import (
    CheckpointRecord,
    Generation,
    NodeRecord,
    PersistedPart,
    PersistRequest,
    SnapshotCommit,
    StoreFailure,
)
from keepstep.elastic.rendezvous.view import View

_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 300.0

_PARTS_S = 3600.0
_PARTS_RATIO = 10.0
"""Parts are waited for this long, or for this multiple of the last checkpoint's time."""

FINAL_ATTEMPTS = 5
"""Failures in a row to store the last step, over half a minute, before the job fails."""


def begin_persist_if_due(
    view: View, present: Sequence[NodeRecord], wall_s: float
) -> Persist | None:
    """Begin to store the committed snapshot if a checkpoint is due.

    One is due every `checkpoint_every` steps, or with `AUTO` when the best interval has passed
    since the last, and at the end of the job. With `AUTO` the first is stored at once: its cost is
    unknown.
    """
    if view.snapshot is None or absent_holders(view, view.snapshot):
        return None
    if not _is_storage_known(view) or is_undone(view, view.snapshot) is not False:
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
    failed = view.store_failure
    # A time in the future comes from a leader whose clock was ahead: it is not waited for.
    if failed is not None and (
        failed.at_s <= wall_s < retry_at_s(failed) or (failed.step >= step and not finishing)
    ):
        return None
    if every == AUTO:
        last = view.checkpoint
        is_due = last is None or not last.at_s <= wall_s < last.at_s + checkpoint_interval_s(
            view, wall_s
        )
    else:
        is_due = every is not None and step // every > stored // every
    if step > stored and (is_due or finishing):
        return Persist(_request(view, view.snapshot, present, wall_s))
    return None


def is_stored(view: View, step: int) -> bool:
    """Whether a checkpoint of this step, or of a later one, is known."""
    return view.checkpoint is not None and view.checkpoint.step >= step


def differing_urls(records: Iterable[NodeRecord]) -> str | None:
    """Return an error if the nodes' scripts name several places for checkpoints, else None.

    Nothing could be stored then, and each rank would wait for the last step for ever.
    """
    first: NodeRecord | None = None
    for record in records:
        if record.checkpoint_url is None:
            continue
        if first is None:
            first = record
        if record.checkpoint_url != first.checkpoint_url:
            return (
                f"the ranks on {first.node} store checkpoints at {first.checkpoint_url}, those on "
                f"{record.node} at {record.checkpoint_url}; give all ranks the same URL, made from "
                "values that they share, such as the job's name, and not from the time or the host"
            )
    return None


def _request(
    view: View, commit: SnapshotCommit, records: Sequence[NodeRecord], wall_s: float
) -> PersistRequest:
    """Return the request to store a snapshot as the nodes' scripts say, which agree."""
    record = next(record for record in records if record.checkpoint_url)
    assert record.checkpoint_url is not None, "it was just looked for"
    return PersistRequest(
        commit,
        record.checkpoint_url,
        wall_s,
        _run(view),
        _base(view),
        record.checkpoint_compression,
        record.checkpoint_retention,
    )


def record_loaded(view: View, wall_s: float) -> RecordLoaded | None:
    """Record the checkpoint that the job has resumed from, if it is not the one that is recorded.

    An earlier launch has stored it: it need not be stored again, and numbers of generations in
    storage go on from there. Or a later checkpoint of this launch is damaged, or was undone because
    a step was rejected: it does not count as stored any more.
    """
    if view.generation is None:
        return None
    for record in _of_generation(view):
        if record.loaded is not None and record.checkpoint_url is not None:
            if not _replaces_recorded(view, record.loaded.step):
                return None
            return RecordLoaded(
                CheckpointRecord(
                    step=record.loaded.step,
                    generation=0,
                    url=record.checkpoint_url,
                    at_s=wall_s,
                    base=record.loaded.newest_generation,
                )
            )
    return None


def _replaces_recorded(view: View, step: int) -> bool:
    """Whether to record a checkpoint of this step, from which the generation has resumed.

    A recorded checkpoint that the generation itself has stored stands.
    """
    generation, recorded = view.generation, view.checkpoint
    if recorded is None or generation is None:
        return recorded is None
    return recorded.generation < generation.generation and step < recorded.step


def is_undone(view: View, commit: SnapshotCommit) -> bool | None:
    """Whether the generation has gone on from an older state than a snapshot before it.

    It does so after a rejected step. None: rank 0 has not reported yet from which state the
    generation goes on, so the snapshot must not be stored now.
    """
    generation = view.generation
    if generation is None or commit.snapshot.generation >= generation.generation:
        return False
    of_generation = list(_of_generation(view))
    if any(r.loaded is not None and r.loaded.step < commit.snapshot.step for r in of_generation):
        return True
    return False if _has_rank_0_restored(generation, of_generation) else None


def _is_storage_known(view: View) -> bool:
    """Whether rank 0 has reported the checkpoint that it found in storage, if it has looked."""
    if view.checkpoint is not None or view.generation is None or view.generation.resume is not None:
        return True
    return _has_rank_0_restored(view.generation, _of_generation(view))


def _has_rank_0_restored(generation: Generation, records: Iterable[NodeRecord]) -> bool:
    first = generation.members[0].node
    return any(record.node == first and "restored" in record.times for record in records)


def _of_generation(view: View) -> Iterator[NodeRecord]:
    """Return the records that describe members in the current generation."""
    for member in view.generation.members if view.generation is not None else ():
        joined = view.nodes.get(member.node)
        if joined is not None and joined.record.generation == view.generation_number:
            yield joined.record


def _run(view: View) -> str:
    """Return a name of this run of the job, from the secret that is drawn for each run."""
    return hashlib.sha256(b"run " + (view.secret or b"")).hexdigest()[:12]


def _base(view: View) -> int:
    return view.checkpoint.base if view.checkpoint is not None else 0


def given_up_at_s(view: View, request: PersistRequest) -> float:
    """Return the deadline for the parts of a checkpoint, in wall-clock seconds.

    Storage that hangs, such as a network file system, may never answer. After each failure in a row
    the next attempt has twice as long: the storage may only be slow.
    """
    failed = view.store_failure.count if _fails_in_a_row(view) and view.store_failure else 0
    took_s = view.checkpoint.took_s if view.checkpoint is not None else 0.0
    return request.at_s + max(_PARTS_S, _PARTS_RATIO * took_s) * 2.0 ** min(failed, 10)


def parts_awaited_until_s(view: View, now_s: float, wall_s: float) -> float | None:
    """Return the deadline for the parts of a checkpoint, in monotonic seconds."""
    if view.persist is None:
        return None
    return now_s + max(0.0, given_up_at_s(view, view.persist) - wall_s)


def continue_persist(
    view: View, request: PersistRequest, wall_s: float
) -> Publish | CancelPersist | None:
    """Publish the checkpoint that is being stored once all holders have written their parts.

    It is cancelled if one fails, does not answer, or is gone: a holder that is no member of the
    current generation may go without ending it, and its part with it.
    """
    step = request.commit.snapshot.step
    parts, missing = [], []
    for holder in request.commit.holders:
        joined = view.nodes.get(holder.node)
        if joined is None or joined.record.server != holder.server:
            reason = f"{holder.node} was gone before it had written its part of step {step}"
            return cancel_persist(view, request, reason)
        part = _answer(view, request, holder.node)
        if part is None:
            missing.append(holder.node)
            continue
        if "error" in part:
            reason = f"{holder.node} could not write step {step} to {request.url}: {part['error']}"
            return cancel_persist(view, request, reason)
        parts.append(part)
    if missing and wall_s >= given_up_at_s(view, request):
        late = f"{', '.join(missing)} had not written step {step} to {request.url}"
        return cancel_persist(view, request, f"{late} after {wall_s - request.at_s:.0f} s")
    if missing:
        return None
    return Publish(request, tuple(parts), view.revisions.get("persist", 0))


def cancel_persist(view: View, request: PersistRequest, reason: str) -> CancelPersist:
    """Abandon an attempt to store, and count it with those that failed right before it."""
    failed = view.store_failure
    return CancelPersist(
        request, reason, failed.count + 1 if failed and _fails_in_a_row(view) else 1
    )


def _fails_in_a_row(view: View) -> bool:
    """Whether nothing was stored since the last failure."""
    failed, stored = view.store_failure, view.checkpoint
    return failed is not None and (stored is None or stored.at_s < failed.at_s)


def retry_at_s(failed: StoreFailure) -> float:
    """Return when storing is tried again after a failure, in wall-clock seconds.

    The pause doubles with each failure in a row: a storage that is away for an hour is asked a few
    times, and not at every step.
    """
    return failed.at_s + min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (failed.count - 1))


def _answer(view: View, request: PersistRequest, node: str) -> Mapping[str, Any] | None:
    """Return a holder's answer to this request; None while there is none."""
    joined = view.nodes.get(node)
    part = joined.record.persisted if joined is not None else None
    snapshot = request.commit.snapshot
    if (
        part is None
        or (part.step, part.generation) != (snapshot.step, snapshot.generation)
        or part.attempt != view.revisions.get("persist", 0)
    ):
        return None
    return part.part


@dataclass(frozen=True, slots=True)
class PartAttempt:
    """A holder's attempt to write its part; `revision` is that of the request's key."""

    request: PersistRequest
    revision: int

    @property
    def name(self) -> str:
        """The attempt's name in storage: no other attempt has it.

        It ends with the run, by which a server recognizes its own job's attempts.
        """
        return f"{self.revision}-{self.request.run}"

    def answer(self, part: Mapping[str, Any]) -> PersistedPart:
        """Return the attempt's outcome for the node's record."""
        snapshot = self.request.commit.snapshot
        return PersistedPart(
            step=snapshot.step, generation=snapshot.generation, part=part, attempt=self.revision
        )


def next_part(
    view: View, server: str, entered: int, begun: PartAttempt | None
) -> PartAttempt | None:
    """Return the attempt that a node begins now; None if it has begun it, or is no holder.

    Entering a generation ends the attempts of the one before, so that none begins until the node
    has entered the current one.

    Args:
        view: the node's view.
        server: the address of its snapshot server.
        entered: the generation that the node has entered.
        begun: the attempt that it has begun last.
    """
    request, revision = view.persist, view.revisions.get("persist", 0)
    if request is None or entered != view.generation_number:
        return None
    if begun is not None and begun.revision == revision:
        return None
    if all(holder.server != server for holder in request.commit.holders):
        return None
    return PartAttempt(request, revision)


def is_over(view: View, begun: PartAttempt) -> bool:
    """Whether an attempt is published or cancelled, or another one has taken its place."""
    return view.revisions.get("persist", 0) != begun.revision


def persist_before_leaving(
    view: View, present: Sequence[NodeRecord], resume: SnapshotCommit | None, wall_s: float
) -> Action | None:
    """Store the newest snapshot before its holders leave: too few nodes stay to resume from it.

    One that storage completes is stored: its holders are then those that have not left yet. A
    holder may be no member any more: the members that took over may all be lost.
    """
    if resume is None or resume.stored or absent_holders(view, resume):
        return None
    if not any(record.leaving for record in _concerned(view, present, resume)):
        return None
    return persist_before_pausing(view, present, resume, wall_s)


def persist_before_pausing(
    view: View, present: Sequence[NodeRecord], resume: SnapshotCommit | None, wall_s: float
) -> Action | None:
    """Store the newest snapshot before training stops, if all its holders are here."""
    if resume is None or resume.stored or absent_holders(view, resume):
        return None
    if view.snapshot != resume:
        return Commit(resume)
    if view.persist is not None:
        return continue_persist(view, view.persist, wall_s)
    concerned = _concerned(view, present, resume)
    urls = {record.checkpoint_url for record in concerned if record.checkpoint_url}
    stored = view.checkpoint.step if view.checkpoint else 0
    failed = view.store_failure.step if view.store_failure else 0
    if len(urls) == 1 and resume.snapshot.step > max(stored, failed):
        return Persist(_request(view, resume, concerned, wall_s))
    return None


def _concerned(
    view: View, present: Sequence[NodeRecord], resume: SnapshotCommit
) -> list[NodeRecord]:
    return [*present, *(view.nodes[holder.node].record for holder in resume.holders)]
