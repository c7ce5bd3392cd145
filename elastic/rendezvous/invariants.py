"""Checks the rendezvous' invariants of documents, their changes, and a leader's actions.

Pure. Production calls these functions and stops the writer that breaks a promise before it writes:
a member checks its own record (`check_record`), its view whenever it joins or reads all of it
(`check_view`) and every change of it (`check_transition`), a leader its action against the records
that it rests on (`check_action`) and the change that its transaction makes (`check_transition`).
The simulator calls the same functions on every revision. They are written independently of the
decisions, and share no code with them, so that they find a fault there.

A node's record is checked by its own writer and, where an action rests on it, by the leader; other
members do not check it, so that a wrong record stops nobody else.

Every function raises `InvariantViolated`, which names the invariant and the contradiction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.errors import InvariantViolated
from keepstep.elastic.rendezvous import actions
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_assignment import rank_limits
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    CheckpointRecord,
    Closing,
    Generation,
    Member,
    NodePhase,
    NodeRecord,
    PersistRequest,
    Release,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import View

_OVER = (NodePhase.DRAINED, NodePhase.DONE)


def check_record(view: View, written: NodeRecord | None, record: NodeRecord) -> None:
    """Check a record before its own node writes it over `written`, the last one that it wrote."""
    if record.generation > view.generation_number:
        raise InvariantViolated(
            "a record names a generation that was opened",
            f"{record.node} writes generation {record.generation}, the newest is "
            f"{view.generation_number}",
        )
    if written is not None and record.generation < written.generation:
        raise InvariantViolated(
            "a record's generation never decreases",
            f"{record.node} writes {record.generation} after {written.generation}",
        )


def check_view(view: View) -> None:
    """Check every job-wide document by itself and against the others."""
    if view.generation is not None:
        check_generation(view.generation)
    if view.snapshot is not None:
        _check_snapshot(view, view.snapshot)
    if view.closing is not None:
        _check_closing(view)
    if view.persist is not None:
        _check_persist(view, view.persist)


def check_transition(before: View, after: View) -> None:
    """Check the change from one revision to the next; only changed documents are looked at."""
    if before.secret is not None and after.secret is None:
        if len(before.nodes) > 1:
            raise InvariantViolated(
                "a job's keys are deleted by its last member only",
                f"{', '.join(sorted(before.nodes))} are members",
            )
        return
    if before.revisions == after.revisions:
        return
    if before.revisions.get("secret") != after.revisions.get("secret"):
        # The job begins, or a node has restored the keys that the coordinator had lost.
        _check_restored(before, after)
        check_view(after)
        return
    if None not in (before.leadership, after.leadership) and after.leadership != before.leadership:
        raise InvariantViolated(
            "a leader leads until its lease ends",
            f"{before.leadership} is followed by {after.leadership}",
        )
    if after.release is not None and after.release != before.release:
        _check_release(after, after.release)
    if before.result is not None and _leader_documents(before) != _leader_documents(after):
        raise InvariantViolated("nothing is decided after the result", f"{before.result.message!r}")
    if after.generation is not None and after.generation != before.generation:
        _check_opening(before, after, after.generation)
    else:
        _check_change_within_generation(before, after)
    _check_storing(before, after)
    known, now = before.history.recoveries, after.history.recoveries
    if known != now and (not now or (known and now[-1].generation <= known[-1].generation)):
        raise InvariantViolated(
            "a recovery is recorded once",
            f"history of {len(known)} becomes one of {len(now)}",
        )


def _check_restored(before: View, after: View) -> None:
    is_newer = before.is_restored and after.generation_number > before.generation_number
    if before.generation is not None and not is_newer:
        raise InvariantViolated(
            "a job's keys are restored once, or by a node that has seen a newer generation",
            f"generation {after.generation_number} replaces {before.generation_number}",
        )


def check_generation(generation: Generation) -> None:
    """Check a generation document by itself."""
    number, members = generation.generation, generation.members
    if number < 1:
        raise InvariantViolated("generations count from 1", f"generation {number}")
    _check_places(f"generation {number}", members, generation.parity)
    resume = generation.resume
    if resume is not None and resume.snapshot.generation >= number:
        raise InvariantViolated(
            "a generation resumes from an older one's snapshot",
            f"generation {number} resumes from {resume.snapshot}",
        )


def check_action(policy: RendezvousPolicy, view: View, action: actions.Action) -> None:
    """Check that the records of a leader's view allow an action.

    Args:
        policy: the job's limits.
        view: the view on which the action was decided, with reports folded in.
        action: the action that is about to be performed.
    """
    policy = policy.scaled(view.scale)
    match action:
        case actions.Open(generation):
            _check_members(policy, view, generation)
            _check_drained(view)
            check_resume(view, generation)
            if generation.resume is not None:
                _check_placed(view, generation.resume)
        case actions.Commit(commit):
            check_commit(view, commit)
            _check_placed(view, commit)
        case actions.Persist(request):
            _check_placed(view, request.commit)
            _check_holders_present(view, request.commit)
        case actions.Publish(request=request, parts=parts):
            check_parts(view, request, parts)
        case actions.CancelPersist(request):
            _check_is_current_request(view, request)
        case actions.RecordLoaded(checkpoint):
            _check_loaded(view, checkpoint)
        case actions.ReleaseMembers():
            _check_drained(view)
        case actions.OrderAbort(order):
            _check_fenced(view)
            _check_announced(view, order)
        case actions.Evict(node):
            _check_evicted(policy, view, node)
        case actions.Close() | actions.RecordRecovery() | actions.Finish():
            pass  # `check_transition` checks everything.


def check_commit(view: View, commit: SnapshotCommit) -> None:
    """Check that every member of the generation has sealed and protects a snapshot.

    Parity is not required once all have drained: a snapshot that all have sealed may then be
    committed to be stored before its holders leave.
    """
    generation = view.generation
    is_known = view.snapshot is not None and view.snapshot.snapshot == commit.snapshot
    if not is_known and (generation is None or commit.holders != generation.members):
        raise InvariantViolated(
            "a commit's holders are the members of its generation",
            f"{commit.snapshot} is held by {_names(commit.holders)}",
        )
    records = [_record(view, holder) for holder in commit.holders]
    have_drained = all(record is not None and record.phase in _OVER for record in records)
    for holder, record in zip(commit.holders, records, strict=True):
        if record is None or commit.snapshot not in record.sealed:
            raise InvariantViolated(
                "a snapshot is committed when all of its holders have sealed it",
                f"{holder.node} has not sealed {commit.snapshot}",
            )
        if not have_drained and commit.snapshot not in record.protected:
            raise InvariantViolated(
                "a snapshot is committed when all of its holders have its parity",
                f"{holder.node} has no parity of {commit.snapshot}",
            )


def check_resume(view: View, generation: Generation) -> None:
    """Check that a generation resumes from the newest snapshot that can be restored."""
    resume = generation.resume
    reached = -1 if resume is None else resume.snapshot.step
    for committed in _committed(view):
        if committed.snapshot.step > reached and not _loses_too_much(view, committed):
            raise InvariantViolated(
                "a committed snapshot that can be restored is kept",
                f"{committed.snapshot} is held by enough of {_names(committed.holders)}",
            )
    if resume is None:
        return
    if resume.stored:
        stored = view.checkpoint
        if stored is None or not _is_of(stored, resume):
            raise InvariantViolated(
                "a snapshot that storage completes is the newest checkpoint",
                f"{resume.snapshot} completed from {resume.stored}, stored is {stored}",
            )
    elif _loses_too_much(view, resume):
        raise InvariantViolated(
            "a generation resumes from a snapshot that can be restored",
            f"of {resume.snapshot}, {_names(_absent(view, resume))} are lost of "
            f"{_names(resume.holders)}, with parity {resume.parity}",
        )
    lost = sorted(rank for holder in _absent(view, resume) for rank in holder.ranks)
    rebuilt = sorted(rebuild.rank for rebuild in resume.shard_rebuilds)
    adopters = {rebuild.node for rebuild in resume.shard_rebuilds}
    if lost != rebuilt or not adopters <= {member.node for member in generation.members}:
        raise InvariantViolated(
            "members rebuild exactly the shards that are lost",
            f"lost ranks {lost}, rebuilt {rebuilt} by {sorted(adopters)}",
        )


def check_parts(view: View, request: PersistRequest, parts: Sequence[object]) -> None:
    """Check that a checkpoint is published from one written part of each holder."""
    _check_is_current_request(view, request)
    wanted = request.commit.snapshot
    for holder in request.commit.holders:
        record = _record(view, holder)
        part = record.persisted if record is not None else None
        if (
            part is None
            or (part.generation, part.step) != (wanted.generation, wanted.step)
            or part.attempt != view.revisions.get("persist", 0)
            or "error" in part.part
        ):
            raise InvariantViolated(
                "a checkpoint is published when all of its parts are written",
                f"{holder.node}'s part of {wanted} is {part}",
            )
    if len(parts) != len(request.commit.holders):
        raise InvariantViolated(
            "a checkpoint is published when all of its parts are written",
            f"{len(parts)} parts of {len(request.commit.holders)} holders",
        )


def _check_members(policy: RendezvousPolicy, view: View, generation: Generation) -> None:
    members = generation.members
    if not policy.min_nodes <= len(members) <= policy.max_nodes:
        raise InvariantViolated(
            "a generation has min to max nodes",
            f"{len(members)} of {policy.min_nodes} to {policy.max_nodes}",
        )
    limits = rank_limits(view)
    if not limits.allow(generation.world_size):
        raise InvariantViolated(
            "a generation has as many ranks as the mesh has places for",
            f"{generation.world_size} ranks, {limits}",
        )
    for member in members:
        record = _record(view, member)
        if record is None or not record.warm or record.leaving or member.node in view.evictions:
            raise InvariantViolated(
                "members are present, warm, and stay", f"{member.node} is {record}"
            )
        described = (record.server, record.nproc, record.domain)
        if (member.server, member.nproc, member.domain) != described:
            raise InvariantViolated(
                "a place describes the node as its record does", f"{member}, {record}"
            )


def _check_drained(view: View) -> None:
    """Check that no member of the old generation can still write in it."""
    old = view.generation
    if old is None:
        return
    for member in old.members:
        record = _record(view, member)
        # Another server: the membership that had this place is over, and so are its workers.
        if record is None or record.server != member.server:
            continue
        if record.generation != old.generation or record.phase not in _OVER:
            raise InvariantViolated(
                "a generation is opened when all that remain of the last one have drained",
                f"{member.node} is {record.phase} in generation {record.generation}",
            )


def _check_fenced(view: View) -> None:
    """Check that nothing of the generation that closes can be sealed any more."""
    old = view.generation
    if old is None or not view.is_closing:
        raise InvariantViolated("only a generation that closes is aborted", f"{view.closing}")
    for member in old.members:
        record = _record(view, member)
        # Another server: the membership that had this place is over, and so are its workers.
        if record is None or record.server != member.server:
            continue
        is_over = record.generation == old.generation and record.phase in _OVER
        if not is_over and record.fenced != old.generation:
            raise InvariantViolated(
                "collectives are aborted when nobody can seal what they leave",
                f"{member.node} may still seal in generation {record.generation}",
            )


def _check_announced(view: View, order: AbortOrder) -> None:
    """Check that an order to abort names the newest commit that members knew when they were
    fenced."""
    announced = _announced_commits(view)
    if order.committed != max(announced, default=None):
        raise InvariantViolated(
            "an order to abort names the newest snapshot that members know as committed",
            f"it names {order.committed}, they know {sorted(announced)}",
        )


def _committed(view: View) -> list[SnapshotCommit]:
    """Return the snapshot that is known to be committed when the next generation is opened."""
    commits = [] if view.snapshot is None else [view.snapshot]
    if view.generation is not None:
        order, members = view.abort_order, view.generation.members
        announced = _announced_commits(view) if order is None else {order.committed}
        parity = view.generation.parity
        commits += [
            SnapshotCommit(found, members, parity) for found in announced if found is not None
        ]
    return commits


def _announced_commits(view: View) -> set[SnapshotId]:
    """Return the snapshots that present members of the generation know as committed."""
    announced = set()
    for member in view.generation.members if view.generation is not None else ():
        record = _record(view, member)
        if record is not None and record.server == member.server and record.committed is not None:
            announced.add(record.committed)
    return {found for found in announced if found.generation == view.generation_number}


def _check_opening(before: View, after: View, generation: Generation) -> None:
    check_generation(generation)
    old = before.generation
    if old is not None and generation.generation != old.generation + 1:
        raise InvariantViolated(
            "a generation's number grows by one",
            f"{old.generation} is followed by {generation.generation}",
        )
    if old is not None and not before.is_closing:
        raise InvariantViolated(
            "a generation is opened after the last one was closed", f"{old.generation} is open"
        )
    if (
        after.closing is not None
        or after.abort_order is not None
        or after.release is not None
        or after.persist is not None
        or after.restarts
    ):
        raise InvariantViolated(
            "a generation begins without requests of the last one",
            f"generation {generation.generation}",
        )
    if after.snapshot != generation.resume:
        raise InvariantViolated(
            "a generation begins with the snapshot that it resumes from",
            f"{after.snapshot} and {generation.resume}",
        )
    if generation.resume is not None:
        committed = before.snapshot.snapshot if before.snapshot is not None else None
        resumed = generation.resume.snapshot
        if resumed != committed and (old is None or resumed.generation != old.generation):
            raise InvariantViolated(
                "a generation resumes from the committed snapshot, or a newer one of the last",
                f"{resumed}, committed is {committed}",
            )


def _check_change_within_generation(before: View, after: View) -> None:
    if after.abort_order != before.abort_order and (
        before.abort_order is not None
        or after.abort_order is None
        or not after.is_closing
        or after.abort_order.generation != after.generation_number
    ):
        raise InvariantViolated(
            "an order to abort is given once, to a generation that closes",
            f"{before.abort_order} becomes {after.abort_order}",
        )
    if after.closing != before.closing:
        if before.is_closing and not _is_broken_off(before.closing, after.closing):
            raise InvariantViolated(
                "a generation is closed once, or in good order and then by an abort",
                f"{before.closing} becomes {after.closing}",
            )
        if after.closing is not None:
            _check_closing(after)
    if after.snapshot != before.snapshot:
        if after.snapshot is None:
            raise InvariantViolated(
                "a committed snapshot is dropped only by opening a generation",
                f"{before.snapshot}",
            )
        _check_snapshot(after, after.snapshot)
        if before.snapshot is not None:
            _check_newer(before.snapshot, after.snapshot)
        if after.snapshot.snapshot.generation != after.generation_number and (
            before.snapshot is None or before.snapshot.snapshot != after.snapshot.snapshot
        ):
            raise InvariantViolated(
                "only the current generation's snapshots are committed",
                f"{after.snapshot.snapshot} in generation {after.generation_number}",
            )


def _check_newer(before: SnapshotCommit, after: SnapshotCommit) -> None:
    if after.snapshot < before.snapshot:
        raise InvariantViolated(
            "commits never go back", f"{before.snapshot} is followed by {after.snapshot}"
        )
    if after.snapshot == before.snapshot and after.holders != before.holders:
        raise InvariantViolated(
            "a snapshot has one commit", f"{after.snapshot} held by {_names(after.holders)}"
        )


def _check_storing(before: View, after: View) -> None:
    request = before.persist
    if after.persist != request and after.persist is not None:
        if request is not None:
            raise InvariantViolated(
                "one snapshot is stored at a time",
                f"{request.commit.snapshot}, and {after.persist.commit.snapshot}",
            )
        if after.persist.commit != before.snapshot:
            raise InvariantViolated(
                "only the committed snapshot is stored",
                f"{after.persist.commit.snapshot}, committed is {before.snapshot}",
            )
        if before.checkpoint is not None and _is_of(before.checkpoint, after.persist.commit):
            raise InvariantViolated("a snapshot is stored once", f"{before.checkpoint}")
    is_loaded = (
        after.checkpoint is not None
        and after.checkpoint.generation == 0
        and _may_be_loaded(before, after.checkpoint)
        and after.persist == request
    )
    if (
        after.checkpoint != before.checkpoint
        and not is_loaded
        and not (
            request is not None
            and after.persist is None
            and after.checkpoint is not None
            and _is_of(after.checkpoint, request.commit)
        )
    ):
        raise InvariantViolated(
            "a checkpoint is recorded for the request that it answers",
            f"{after.checkpoint} for {request}",
        )
    if after.store_failure != before.store_failure and not (
        request is not None
        and after.persist is None
        and after.store_failure is not None
        and after.store_failure.step == request.commit.snapshot.step
    ):
        raise InvariantViolated(
            "a failure to store is recorded for the request that it answers",
            f"{after.store_failure} for {request}",
        )


def _may_be_loaded(view: View, checkpoint: CheckpointRecord) -> bool:
    """Whether the generation may have resumed from a checkpoint although another is recorded."""
    recorded, generation = view.checkpoint, view.generation
    return recorded is None or (
        generation is not None
        and recorded.generation < generation.generation
        and checkpoint.step < recorded.step
    )


def _check_evicted(policy: RendezvousPolicy, view: View, node: str) -> None:
    others = [
        name
        for name, joined in view.nodes.items()
        if name != node and name not in view.evictions and not joined.record.leaving
    ]
    if len(others) < policy.min_nodes:
        raise InvariantViolated(
            "a node is evicted only if enough others are left",
            f"{node} of {sorted(view.nodes)}, {policy.min_nodes} are needed",
        )


def _check_loaded(view: View, checkpoint: CheckpointRecord) -> None:
    reported = [joined.record.loaded for joined in view.nodes.values() if joined.record.loaded]
    if not any(
        (loaded.step, loaded.newest_generation) == (checkpoint.step, checkpoint.base)
        for loaded in reported
    ):
        raise InvariantViolated(
            "a checkpoint of an earlier launch is recorded as rank 0 found it",
            f"{checkpoint}, found was {reported}",
        )


def _check_release(view: View, release: Release) -> None:
    if not view.is_closing or release.generation != view.generation_number:
        raise InvariantViolated(
            "members are released from a generation that closes",
            f"{release.generation} releases them, {view.generation_number} is open",
        )


def _is_broken_off(before: Closing | None, after: Closing | None) -> bool:
    """Whether a closing in good order becomes an abort; nothing else of a closing may change."""
    return (
        before is not None
        and after is not None
        and not before.abort
        and after == replace(before, abort=True, reason=after.reason)
    )


def _check_closing(view: View) -> None:
    if view.closing is not None and view.closing.generation != view.generation_number:
        raise InvariantViolated(
            "only the open generation is closed",
            f"{view.closing.generation} is closed, {view.generation_number} is open",
        )


def _check_snapshot(view: View, commit: SnapshotCommit) -> None:
    if commit.snapshot.generation > view.generation_number:
        raise InvariantViolated(
            "a commit names a generation that was opened",
            f"{commit.snapshot}, the newest is {view.generation_number}",
        )
    if commit.stored:
        # The remaining holders, in any ranks.
        ranks = [rank for holder in commit.holders for rank in holder.ranks]
        if not ranks or len(set(ranks)) != len(ranks):
            raise InvariantViolated("each rank has one holder", _names(commit.holders))
        return
    _check_places(str(commit.snapshot), commit.holders, commit.parity)


def _check_persist(view: View, request: PersistRequest) -> None:
    if view.snapshot is None or request.commit.snapshot > view.snapshot.snapshot:
        raise InvariantViolated(
            "only a committed snapshot is stored",
            f"{request.commit.snapshot}, committed is {view.snapshot}",
        )


def _check_places(owner: str, members: Sequence[Member], parity: int) -> None:
    """Check that members have contiguous ranks from 0, and groups that can carry the parity."""
    next_rank = 0
    for member in members:
        if member.first_rank != next_rank or member.nproc < 1:
            raise InvariantViolated(
                "ranks are contiguous from 0",
                f"{owner}: {member.node} has {member.nproc} from {member.first_rank}, "
                f"expected {next_rank}",
            )
        next_rank += member.nproc
    if not members or len({member.node for member in members}) != len(members):
        raise InvariantViolated("each node has one place", f"{owner}: {_names(members)}")
    smallest = min(Counter(member.group for member in members).values())
    if not 0 <= parity < smallest:
        raise InvariantViolated(
            "a group has more nodes than may be lost of it",
            f"{owner}: parity {parity}, a group of {smallest}",
        )


def _check_placed(view: View, commit: SnapshotCommit) -> None:
    """Check that readers, which get a commit without its holders, will derive the same ones."""
    placed = view.members.get(commit.snapshot.generation, ())
    if commit.holders != tuple(m for m in placed if m.node not in commit.absent):
        raise InvariantViolated(
            "a snapshot's holders are members of its generation",
            f"{commit.snapshot} is held by {_names(commit.holders)}, placed are {_names(placed)}",
        )


def _check_is_current_request(view: View, request: PersistRequest) -> None:
    if request != view.persist:
        raise InvariantViolated(
            "a request to store is answered while it stands",
            f"{request.commit.snapshot} is answered, {view.persist} stands",
        )


def _check_holders_present(view: View, commit: SnapshotCommit) -> None:
    absent = _absent(view, commit)
    if absent:
        raise InvariantViolated(
            "a snapshot is stored by all of its holders",
            f"{_names(absent)} do not hold {commit.snapshot}",
        )


def _leader_documents(view: View) -> tuple[object, ...]:
    return (
        view.generation, view.closing, view.abort_order, view.release, view.snapshot, view.persist,
        view.checkpoint, view.store_failure, view.history, view.result,
    )  # fmt: skip


def _record(view: View, member: Member) -> NodeRecord | None:
    joined = view.nodes.get(member.node)
    return joined.record if joined is not None else None


def _absent(view: View, commit: SnapshotCommit) -> list[Member]:
    """Return the holders that are gone or no longer hold the snapshot."""
    records = {holder.node: _record(view, holder) for holder in commit.holders}
    return [
        holder
        for holder in commit.holders
        if (record := records[holder.node]) is None or commit.snapshot not in record.sealed
    ]


def _loses_too_much(view: View, commit: SnapshotCommit) -> bool:
    """Whether parity cannot rebuild a snapshot's lost shards.

    A node that knows of a newer commit has freed it, or frees it once it is stored.
    """
    freed = {
        holder.node
        for holder in commit.holders
        if (record := _record(view, holder)) is not None
        and record.committed is not None
        and commit.snapshot < record.committed
    }
    absent = {holder.node for holder in _absent(view, commit)} | freed
    if absent and commit.stored:
        return True
    groups = Counter(holder.group for holder in commit.holders if holder.node in absent)
    if groups and max(groups.values()) > commit.parity:
        return True
    left = [
        holder.node
        for holder in commit.holders
        if holder.node not in absent and holder.group in groups
    ]
    return not all(commit.snapshot in view.nodes[node].record.protected for node in left)


def _is_of(stored: CheckpointRecord, commit: SnapshotCommit) -> bool:
    return (stored.generation, stored.step) == (commit.snapshot.generation, commit.snapshot.step)


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.node for member in members)
