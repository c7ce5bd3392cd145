"""Makes the leader's decisions, as a pure function of what the coordinator holds.

The leader mirrors the job's keys, calls `decide` and performs the action that it returns in a
transaction, which fails unless the node still leads and nothing else has been decided
since (`keepstep.elastic.rendezvous.transactions`). Decisions rest on the whole state, not on single
events: a missed or repeated event changes nothing, and a new leader needs no handover.

A generation's life: open -> (failure, loss, leave, join) -> closing -> all present members drained
-> the next one is open.

Invariants:
- A generation's number grows by one.
- A generation is opened when every present member of the last one has drained, with min to max
  nodes.
- A node that was a member and may be one again keeps its ranks, as far as the number of nodes
  allows.
- A snapshot is committed when every member of its generation has sealed it and has its parity.
  Agents are told at once (`keepstep.elastic.rendezvous.commits`), the coordinator when it is due.

`keepstep.elastic.rendezvous.invariants` checks them before every action.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from keepstep.elastic.rendezvous import checkpoint_schedule
from keepstep.elastic.rendezvous.actions import (
    Action,
    Close,
    Commit,
    Finish,
    Open,
    OrderAbort,
    RecordRecovery,
    ReleaseMembers,
)
from keepstep.elastic.rendezvous.commits import COMMIT_INTERVAL_S, is_due
from keepstep.elastic.rendezvous.evictions import end_failures, evict_wrong_replica
from keepstep.elastic.rendezvous.failure_budget import count_failures
from keepstep.elastic.rendezvous.intervals import failures_per_s
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_assignment import (
    absent_holders,
    assign_groups,
    assign_ranks,
    completed_by_storage,
    eligible,
    newest_committed,
    newest_restorable,
    newest_told,
    present_members,
    rank_limits,
    trusts_uncommitted,
    with_shard_rebuilds,
)
from keepstep.elastic.rendezvous.rank_limits import largest_sum
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    Closing,
    FailureKind,
    Generation,
    History,
    Member,
    NodePhase,
    NodeRecord,
    Recovery,
    Release,
    Result,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.standby import losses_until
from keepstep.elastic.rendezvous.view import View

_HISTORY_LENGTH = 32
_PAUSED = "the job is paused; `keepstep resume` goes on"


@dataclass(frozen=True, slots=True)
class LeaderState:
    """A leader's state between two decisions: what it waits for, and since when."""

    waiting_for: str = ""
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A leader's decision.

    Attributes:
        leader_state: to be passed to the next decision.
        action: what to do now, if anything.
        again_at_s: when to decide again even if nothing changes, in monotonic seconds.
        message: what the leader waits for, in words.
    """

    leader_state: LeaderState
    action: Action | None = None
    again_at_s: float | None = None
    message: str = ""


def decide(
    policy: RendezvousPolicy, view: View, leader_state: LeaderState, now_s: float, wall_s: float
) -> Decision:
    """Return what the leader should do next. Pure: equal inputs give equal outputs.

    Args:
        policy: the job's limits.
        view: what the coordinator holds.
        leader_state: what the last decision returned, or a fresh one for a new leader.
        now_s: monotonic seconds, for waiting.
        wall_s: wall-clock seconds, stamped into records for people.
    """
    policy = policy.scaled(view.scale)
    quiet = Decision(LeaderState())
    if view.result is not None:
        return quiet
    generation = view.generation
    if generation is None:
        return _open_first_generation(policy, view, leader_state, now_s, wall_s)
    loaded = checkpoint_schedule.record_loaded(view, wall_s)
    if view.is_closing and loaded is not None:
        # The next generation may go on from memory, and say nothing of it.
        return Decision(leader_state, loaded)
    if view.is_closing:
        return _open_next_generation(policy, view, generation, leader_state, now_s, wall_s)
    present = present_members(view, generation)
    # First, because a job that commits at every step, or is done, would never get to it.
    record_recovery = _record_recovery(view, generation, present)
    if record_recovery is not None:
        return Decision(leader_state, record_recovery)
    if loaded is not None:
        return Decision(leader_state, loaded)
    current = _current(present, generation)
    if len(current) == len(generation.members) and all(r.phase is NodePhase.DONE for r in current):
        if view.persist is not None:
            answered = checkpoint_schedule.continue_persist(view, view.persist, wall_s)
            return Decision(LeaderState(), answered, _parts_awaited_until_s(view, now_s, wall_s))
        return Decision(LeaderState(), Finish(Result(True, "all workers finished")))
    ending = _unrecoverable_result(view, generation, present)
    if ending is not None:
        return Decision(LeaderState(), Finish(ending))
    evict = evict_wrong_replica(policy, view, generation, _current(present, generation))
    if evict is not None:
        return Decision(leader_state, evict)
    closing = _reason_to_close(policy, view, generation, present, wall_s)
    if closing is not None:
        return Decision(LeaderState(), Close(closing))
    commit = _commit(view, generation, present)
    if commit is not None and is_due(view, commit.commit, present, wall_s):
        return Decision(leader_state, commit)
    stored = (
        checkpoint_schedule.continue_persist(view, view.persist, wall_s)
        if view.persist is not None
        else checkpoint_schedule.begin_persist_if_due(view, present, wall_s)
    )
    if stored is not None:
        return Decision(leader_state, stored)
    failed = view.store_failure
    if failed is not None and present and all(record.finishing for record in present):
        # No further step brings another look: the last one is stored when the pause is over.
        wait_s = checkpoint_schedule.retry_at_s(failed) - wall_s
        if wait_s > 0:
            return Decision(leader_state, again_at_s=now_s + wait_s)
    decision = _admit_spares(policy, view, generation, present, leader_state, now_s, wall_s)
    if decision.action is not None:
        return decision
    again_s = [decision.again_at_s, _parts_awaited_until_s(view, now_s, wall_s)]
    if commit is not None and view.snapshot is not None:
        # Announced, and to be written by then even if training pauses.
        again_s.append(now_s + view.snapshot.at_s + COMMIT_INTERVAL_S - wall_s)
    return replace(decision, again_at_s=min((s for s in again_s if s is not None), default=None))


def _parts_awaited_until_s(view: View, now_s: float, wall_s: float) -> float | None:
    """Return until when the parts of a checkpoint are waited for, in monotonic seconds."""
    if view.persist is None:
        return None
    return now_s + max(0.0, checkpoint_schedule.given_up_at_s(view, view.persist) - wall_s)


def may_leave(view: View, node: str) -> bool:
    """Whether neither the ranks nor the memory of a node that leaves are needed any more."""
    generation = view.generation
    if generation is None or view.result is not None:
        return True
    if generation.member(node) is None:
        holders = view.snapshot.holders if view.snapshot else ()
        writers = view.persist.commit.holders if view.persist else ()
        return all(holder.node != node for holder in (*holders, *writers))
    return (
        view.is_closing
        and view.release is not None
        and view.release.generation == generation.generation
    )


def _current(records: Iterable[NodeRecord], generation: Generation) -> list[NodeRecord]:
    """Return the records that describe the node in this generation."""
    return [record for record in records if record.generation == generation.generation]


def _draining(present: Iterable[NodeRecord], generation: Generation) -> list[str]:
    """Return the nodes whose workers may still write in a generation that closes."""
    return [
        record.node
        for record in present
        if record.generation != generation.generation
        or record.phase not in (NodePhase.DRAINED, NodePhase.DONE)
    ]


def _break_off(view: View, old: Generation, present: Sequence[NodeRecord]) -> Closing | None:
    """Return how a generation closes that something breaks while it closes in good order.

    Its ranks wait for the commit of their last snapshot, which then never comes.
    """
    closing = view.closing
    if closing is None or closing.abort:
        return None
    here = {record.node for record in present}
    lost = [member.node for member in old.members if member.node not in here]
    failures = [record.failure for record in _current(present, old) if record.failure]
    if lost:
        why = f"lost {', '.join(lost)}"
    elif failures:
        why = min(failures, key=lambda failure: failure.at_s).message.partition("\n")[0]
    else:
        return None
    return replace(closing, abort=True, reason=f"{closing.reason}; then {why}")


def _order_abort(view: View, old: Generation, present: Sequence[NodeRecord]) -> OrderAbort | None:
    """Return the order to abort, once every member whose workers may still write is fenced.

    An aborted collective returns garbage, also to peers that have not aborted, and nothing raises
    there. So nobody may seal any more before the first one aborts.
    """
    undrained = set(_draining(present, old))
    writing = [record for record in present if record.node in undrained]
    is_fenced = all(record.fenced == old.generation for record in writing)
    if view.abort_order is not None or not writing or not is_fenced:
        return None
    all_fenced = len(present) == len(old.members)
    return OrderAbort(AbortOrder(old.generation, all_fenced, newest_told(present, old)))


def _wait(
    leader_state: LeaderState, for_what: str, now_s: float, at_most_s: float
) -> tuple[LeaderState, float]:
    """Start or continue waiting for something; return the leader's new state and the deadline."""
    if leader_state.waiting_for != for_what:
        leader_state = LeaderState(for_what, now_s)
    return leader_state, leader_state.since_s + at_most_s


def _open_first_generation(
    policy: RendezvousPolicy, view: View, leader_state: LeaderState, now_s: float, wall_s: float
) -> Decision:
    if view.pause is not None:
        return Decision(LeaderState(), message=_PAUSED)
    nodes = eligible(view)
    if len(nodes) < policy.min_nodes:
        return _await_quorum(policy, view, nodes, leader_state, now_s)
    if len(nodes) < policy.max_nodes:
        # The set of nodes is part of the name: each arrival starts the last call anew.
        leader_state, until_s = _wait(
            leader_state, f"last call after {len(nodes)}", now_s, policy.last_call_s
        )
        if now_s < until_s:
            return Decision(
                leader_state, again_at_s=until_s, message=f"{len(nodes)} nodes here, last call"
            )
    members = assign_ranks((), nodes, policy.max_nodes, rank_limits(view))
    if len(members) < policy.min_nodes:
        return _await_quorum(policy, view, nodes, leader_state, now_s)
    opened = _new_generation(policy, view, members, 1, "start", wall_s, wall_s)
    return Decision(LeaderState(), Open(opened))


def _await_quorum(
    policy: RendezvousPolicy,
    view: View,
    nodes: Sequence[NodeRecord],
    leader_state: LeaderState,
    now_s: float,
) -> Decision:
    leader_state, until_s = _wait(leader_state, "quorum", now_s, policy.quorum_timeout_s)
    message = f"waiting for nodes: {len(nodes)} of at least {policy.min_nodes} are here"
    limits = rank_limits(view)
    ranks = sum(record.nproc for record in nodes)
    if ranks and not limits.allow(ranks):
        message += f", with {ranks} ranks; the mesh needs {limits.describe()}"
        is_full = len(nodes) >= policy.max_nodes
        if is_full and view.snapshot is None and not largest_sum([r.nproc for r in nodes], limits):
            hint = f"--nnodes lets no more than {policy.max_nodes} take part; raise it, or change"
            return Decision(LeaderState(), Finish(Result(False, f"{message}. {hint} mesh=")))
    if now_s >= until_s:
        failure = Result(
            False,
            f"{message}, for {policy.quorum_timeout_s:.0f} s; start more nodes, or lower --nnodes",
        )
        return Decision(LeaderState(), Finish(failure))
    return Decision(leader_state, again_at_s=until_s, message=message)


def _unrecoverable_result(
    view: View, generation: Generation, present: Sequence[NodeRecord]
) -> Result | None:
    """Return the job's result if another attempt is pointless.

    That is after a fatal error, when the last checkpoint cannot be stored, or when the nodes do not
    agree where.
    """
    for record in _current(present, generation):
        if record.failure is not None and record.failure.kind is FailureKind.FATAL:
            return Result(False, record.failure.message)
    disagreement = checkpoint_schedule.differing_urls(_current(present, generation))
    if disagreement is not None:
        return Result(False, disagreement)
    failed = view.store_failure
    is_last = failed is not None and failed.count >= checkpoint_schedule.FINAL_ATTEMPTS
    if failed and is_last and present and all(
        r.finishing and r.step <= failed.step for r in present
    ):  # fmt: skip
        return Result(False, f"the last checkpoint could not be stored: {failed.reason}")
    return None


def _reason_to_close(
    policy: RendezvousPolicy,
    view: View,
    generation: Generation,
    present: Sequence[NodeRecord],
    wall_s: float,
) -> Closing | None:
    number = generation.generation
    for member in generation.members if view.restarts else ():
        for request in view.restarts_on(member.node):
            # Before the failures that it causes on other nodes, which do not know the reason.
            reason = (
                f"evicted {member.node}: {view.evictions[member.node].reason}"
                if member.node in view.evictions
                else f"rank {request.rank} on {member.node} is restarted: {request.reason}"
            )
            return Closing(number, reason, True, wall_s)
    failures = [record.failure for record in _current(present, generation) if record.failure]
    causes = [failure for failure in failures if failure.kind.is_cause]
    here = {record.node for record in present}
    lost = [member.node for member in generation.members if member.node not in here]
    if lost and not causes:
        # What is lost explains the collectives that broke.
        since_s = min((failure.at_s for failure in failures), default=wall_s)
        return Closing(number, f"lost {', '.join(lost)}", True, since_s)
    if failures:
        first = min(causes or failures, key=lambda failure: failure.at_s)
        return Closing(
            number,
            first.message.partition("\n")[0],
            True,
            min(failure.at_s for failure in failures),
        )
    again = _joined_again(generation, present)
    if again is not None:
        return Closing(number, f"{again} lost its lease and joined again", True, wall_s)
    for record in present:
        if record.node in view.evictions:
            return Closing(
                number,
                f"evicted {record.node}: {view.evictions[record.node].reason}",
                False,
                wall_s,
            )
        if record.leaving:
            return Closing(number, f"{record.node} leaves", False, wall_s)
    if any(record.phase is not NodePhase.RUNNING for record in present):
        # Its ranks may have been chosen before any worker knew the mesh.
        limits = rank_limits(view)
        if not limits.allow(generation.world_size):
            ranks = f"{generation.world_size} ranks; it needs {limits.describe()}"
            return Closing(number, f"the mesh does not fit {ranks}", False, wall_s)
    if _is_finishing(present):
        return None
    has_state = generation.resume is None or (
        view.snapshot is not None and view.snapshot.snapshot.generation == number
    )
    # Until its own first snapshot is committed, closing would leave it where it began.
    if view.pause is not None and has_state:
        return Closing(number, f"paused: {view.pause.reason}", False, wall_s, pauses=True)
    if len(generation.members) > policy.max_nodes:
        plural = "s" if policy.max_nodes != 1 else ""
        reason = f"scaled to at most {policy.max_nodes} node{plural}"
        return Closing(number, reason, False, wall_s)
    return None


def _is_finishing(present: Iterable[NodeRecord]) -> bool:
    """Whether a node has done its last step, so that no other generation is worth its while."""
    return any(record.finishing or record.phase is NodePhase.DONE for record in present)


def _joined_again(generation: Generation, present: Sequence[NodeRecord]) -> str | None:
    """Return a member whose workers have stopped although the generation is open."""
    drained = (r.node for r in _current(present, generation) if r.phase is NodePhase.DRAINED)
    return next(drained, None)


def _open_next_generation(
    policy: RendezvousPolicy,
    view: View,
    old: Generation,
    leader_state: LeaderState,
    now_s: float,
    wall_s: float,
) -> Decision:
    present = present_members(view, old)
    order = _order_abort(view, old, present)
    if order is not None:
        return Decision(leader_state, order)
    draining = _draining(present, old)
    if draining:
        broken = _break_off(view, old, present)
        if broken is not None:
            return Decision(leader_state, Close(broken))
        # Ranks that drain without an abort take a last snapshot; the one before is committed first.
        in_good_order = view.closing is not None and not view.closing.abort
        may_commit = in_good_order and trusts_uncommitted(view)
        commit = _commit(view, old, present) if may_commit else None
        if commit is not None:
            return Decision(leader_state, commit)
        return Decision(
            leader_state, message=f"generation {old.generation} drains: {', '.join(draining)}"
        )
    evict = evict_wrong_replica(policy, view, old, _current(present, old))
    if evict is not None:
        return Decision(leader_state, evict)
    resume = newest_restorable(view, old) or completed_by_storage(view)
    failures = count_failures(view, old, present, resume)
    if failures.cause is not None and (failures.repeats or failures.count > policy.max_restarts):
        ending = end_failures(policy, view, failures)
        if ending is not None:
            return Decision(LeaderState(), ending)
        failures = replace(failures, count=0, node="")
    nodes = eligible(view)
    losses = losses_until(old, view.nodes.keys(), wall_s)
    members = assign_ranks(old.members, nodes, policy.max_nodes, rank_limits(view), losses)
    # To store it needs all shards: if some are lost, the next generation rebuilds them before it
    # closes again.
    is_whole = (
        resume is None
        or bool(resume.stored)
        or checkpoint_schedule.is_stored(view, resume.snapshot.step)
        or not absent_holders(view, resume)
    )
    has_enough = len(members) >= policy.min_nodes
    if view.pause is not None and (is_whole or not has_enough):
        waiting = checkpoint_schedule.persist_before_pausing(
            view, present, resume, wall_s
        ) or _release(view, old, present, resume)
        again_at_s = _parts_awaited_until_s(view, now_s, wall_s)
        return Decision(LeaderState(), waiting, again_at_s, _PAUSED)
    if not has_enough:
        rescue = checkpoint_schedule.persist_before_leaving(view, present, resume, wall_s)
        if rescue is not None:
            return Decision(LeaderState(), rescue)
        release = _release(view, old, present, resume)
        if release is not None:
            return Decision(leader_state, release)
        return _await_quorum(policy, view, nodes, leader_state, now_s)
    committed = newest_committed(view, old)
    lost = _holders_that_may_return(view, committed, resume)
    if lost:
        # When the coordinator was away for long, all leases end at the same time.
        names = ", ".join(lost)
        leader_state, until_s = _wait(leader_state, f"return of {names}", now_s, policy.return_s)
        if now_s < until_s:
            return Decision(
                leader_state,
                again_at_s=until_s,
                message=f"waiting for {names}, without which step {_step(committed)} is lost",
            )
    closing = view.closing
    detected_at_s = closing.detected_at_s if closing and not closing.pauses else wall_s
    opened = replace(
        _new_generation(
            policy,
            view,
            members,
            old.generation + 1,
            closing.reason if closing else "",
            detected_at_s,
            wall_s,
        ),
        resume=with_shard_rebuilds(resume, view, members) if resume else None,
        failures=failures.count,
        failing_node=failures.node,
        last_error=failures.error,
        reached=failures.reached,
        after_failure=closing is not None and closing.abort,
        lost_from_step=max((record.step for record in _current(present, old)), default=0),
        losses=losses,
    )
    return Decision(LeaderState(), Open(opened))


def _step(commit: SnapshotCommit | None) -> int:
    return commit.snapshot.step if commit else 0


def _holders_that_may_return(
    view: View, committed: SnapshotCommit | None, resume: SnapshotCommit | None
) -> list[str]:
    """Return the lost nodes for want of which the committed snapshot would be given up."""
    if committed is None or (resume and _step(resume) >= _step(committed)):
        return []
    return [
        holder.node
        for holder in committed.holders
        if holder.node not in view.nodes and holder.node not in view.evictions
    ]


def _release(
    view: View,
    old: Generation,
    present: Sequence[NodeRecord],
    resume: SnapshotCommit | None,
) -> ReleaseMembers | None:
    """Let members leave once all have drained and too few stay: storage is what remains.

    What the others have sealed is known once they have drained, and may need a leaver's part.
    """
    if view.release is not None or not any(record.leaving for record in present):
        return None
    stored = view.checkpoint.step if view.checkpoint else 0
    tried = max(stored, view.store_failure.step if view.store_failure else 0)
    is_needed = (
        resume is not None
        and tried < resume.snapshot.step
        and any(record.checkpoint_url is not None for record in present)
    )
    return None if is_needed else ReleaseMembers(Release(old.generation))


def _new_generation(
    policy: RendezvousPolicy,
    view: View,
    members: tuple[Member, ...],
    number: int,
    reason: str,
    detected_at_s: float,
    wall_s: float,
) -> Generation:
    first = view.nodes[members[0].node].record
    members, parity = assign_groups(members, view, policy.group_size, policy.parity)
    return Generation(
        generation=number,
        members=members,
        store_host=first.host,
        store_port=first.store_port,
        reason=reason,
        detected_at_s=detected_at_s,
        opened_at_s=wall_s,
        parity=parity,
        failures_per_s=failures_per_s(view.history.recoveries, len(members), wall_s),
    )


def _commit(view: View, generation: Generation, present: Sequence[NodeRecord]) -> Commit | None:
    if len(present) < len(generation.members):
        return None
    common = set.intersection(*(set(record.protected) for record in present)) if present else set()
    fresh = [s for s in common if s.generation == generation.generation]
    newest = max(fresh, default=None)
    if newest is None or (view.snapshot is not None and newest <= view.snapshot.snapshot):
        return None
    return Commit(SnapshotCommit(newest, generation.members, generation.parity))


def _record_recovery(
    view: View, generation: Generation, present: Sequence[NodeRecord]
) -> RecordRecovery | None:
    known = view.history.recoveries
    if known and known[-1].generation >= generation.generation:
        return None
    records = _current(present, generation)
    if len(records) < len(generation.members) or any(
        "stepped" not in record.times for record in records
    ):
        return None
    resumed = generation.resume.snapshot.step if generation.resume else min(
        int(record.times.get("resumed_step", 0)) for record in records
    )  # fmt: skip
    recovery = Recovery(
        generation=generation.generation,
        reason=generation.reason,
        world_size=generation.world_size,
        detected_at_s=generation.detected_at_s,
        opened_at_s=generation.opened_at_s,
        ready_at_s=max(record.times["ready"] for record in records),
        restored_at_s=max(record.times["restored"] for record in records),
        stepped_at_s=max(record.times["stepped"] for record in records),
        resumed_step=resumed,
        lost_steps=max(0, generation.lost_from_step - resumed),
        after_failure=generation.after_failure,
        source=", ".join(
            sorted({name for r in records for name in r.restored_from.split(", ") if name})
        ),
    )
    return RecordRecovery(History((*known, recovery)[-_HISTORY_LENGTH:]))


def _admit_spares(
    policy: RendezvousPolicy,
    view: View,
    generation: Generation,
    present: Sequence[NodeRecord],
    leader_state: LeaderState,
    now_s: float,
    wall_s: float,
) -> Decision:
    """Close a running generation to let spare nodes in if there is room, after a last call."""
    now = {member.node for member in generation.members}
    nodes = eligible(view)
    then = assign_ranks(
        generation.members, nodes, policy.max_nodes, rank_limits(view), generation.losses
    )
    has_room = sum(member.nproc for member in then) > generation.world_size
    joining = [member.node for member in then if member.node not in now] if has_room else []
    room = policy.max_nodes - len(generation.members)
    settled = all(
        r.phase is NodePhase.RUNNING and r.generation == generation.generation for r in present
    )
    if not joining or not settled or _is_finishing(present):
        return Decision(LeaderState())
    if len(joining) < room:
        leader_state, until_s = _wait(
            leader_state, f"last call after {len(joining)} spares", now_s, policy.last_call_s
        )
        if now_s < until_s:
            return Decision(
                leader_state, again_at_s=until_s, message=f"{len(joining)} nodes join soon"
            )
    names = ", ".join(joining)
    return Decision(
        LeaderState(), Close(Closing(generation.generation, f"{names} joins", False, wall_s))
    )
