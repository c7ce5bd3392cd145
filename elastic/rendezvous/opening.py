"""Decides how the next generation opens. Pure.

The members of the last one drain first. Once nobody computes any more, it decides whether the job
goes on, with which of the nodes that are then present, and from which snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from keepstep.elastic.rendezvous import checkpoint_schedule
from keepstep.elastic.rendezvous.actions import Close, Finish, Open, ReleaseMembers
from keepstep.elastic.rendezvous.closing import break_off, draining, order_abort
from keepstep.elastic.rendezvous.commits import commit_of
from keepstep.elastic.rendezvous.decision import Decision, LeaderState, wait
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
    present_members,
    rank_limits,
    records_in,
    trusts_uncommitted,
    with_shard_rebuilds,
)
from keepstep.elastic.rendezvous.rank_limits import largest_sum
from keepstep.elastic.rendezvous.records import (
    Closing,
    Failure,
    Generation,
    Member,
    NodeRecord,
    Release,
    Result,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.standby import losses_until
from keepstep.elastic.rendezvous.view import View

_PAUSED = "the job is paused; `keepstep resume` goes on"


def open_first_generation(
    policy: RendezvousPolicy, view: View, leader_state: LeaderState, now_s: float, wall_s: float
) -> Decision:
    """Return the next action while there is no generation: wait for nodes, or open the first.

    Arguments as for `keepstep.elastic.rendezvous.decide.decide`.
    """
    if view.pause is not None:
        return Decision(LeaderState(), message=_PAUSED)
    nodes = eligible(view)
    if len(nodes) < policy.min_nodes:
        return _await_quorum(policy, view, nodes, leader_state, now_s)
    if len(nodes) < policy.max_nodes:
        # The set of nodes is part of the name: each arrival restarts the last call.
        leader_state, until_s = wait(
            leader_state, f"last call after {len(nodes)}", now_s, policy.last_call_s
        )
        if now_s < until_s:
            return Decision(
                leader_state,
                again_at_s=until_s,
                message=f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} here, last call",
            )
    members = assign_ranks((), nodes, policy.max_nodes, rank_limits(view))
    if len(members) < policy.min_nodes:
        return _await_quorum(policy, view, nodes, leader_state, now_s)
    opened = _new_generation(policy, view, members, 1, "start", wall_s, wall_s)
    return Decision(LeaderState(), Open(opened))


def open_next_generation(
    policy: RendezvousPolicy,
    view: View,
    old: Generation,
    leader_state: LeaderState,
    now_s: float,
    wall_s: float,
) -> Decision:
    """Return the next action while a generation closes.

    While it drains, that is to order its abort or to commit its last snapshot. Then it is to store,
    release, wait for nodes, end the job, or open the next generation.

    Args:
        policy: the job's limits.
        view: the coordinator's content.
        old: the generation that closes.
        leader_state: as the last decision returned it.
        now_s: monotonic seconds.
        wall_s: wall-clock seconds.
    """
    present = present_members(view, old)
    order = order_abort(view, old, present)
    if order is not None:
        return Decision(leader_state, order)
    undrained = draining(present, old)
    if undrained:
        broken = break_off(view, old, present)
        if broken is not None:
            return Decision(leader_state, Close(broken))
        # Ranks that drain without an abort take a last snapshot; the one before is committed first.
        in_good_order = view.closing is not None and not view.closing.abort
        may_commit = in_good_order and trusts_uncommitted(view)
        commit = commit_of(view, old, present) if may_commit else None
        if commit is not None:
            return Decision(leader_state, commit)
        return Decision(
            leader_state, message=f"generation {old.generation} drains: {', '.join(undrained)}"
        )
    evict = evict_wrong_replica(policy, view, old, records_in(present, old))
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
    # Storing needs all shards: if some are lost, the next generation rebuilds them before it closes
    # again.
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
        again_at_s = checkpoint_schedule.parts_awaited_until_s(view, now_s, wall_s)
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
        # One whose agent and snapshot server have ended does not come back with what it held.
        names = ", ".join(holder.node for holder in lost)
        leader_state, until_s = wait(leader_state, f"return of {names}", now_s, policy.return_s)
        if now_s < until_s:
            return Decision(
                leader_state,
                again_at_s=until_s,
                message=f"waiting for {names}, without which step {_step(committed)} is lost",
                asks=lost,
            )
    closing = view.closing
    detected_at_s = closing.detected_at_s if closing and not closing.pauses else wall_s
    opened = replace(
        _new_generation(
            policy,
            view,
            members,
            old.generation + 1,
            _reason(closing, failures.cause) if closing else "",
            detected_at_s,
            wall_s,
        ),
        resume=with_shard_rebuilds(resume, view, members) if resume else None,
        failures=failures.count,
        failing_node=failures.node,
        last_error=failures.error,
        reached=failures.reached,
        after_failure=closing is not None and closing.abort,
        lost_from_step=max((record.step for record in records_in(present, old)), default=0),
        losses=losses,
    )
    return Decision(LeaderState(), Open(opened))


def _reason(closing: Closing, cause: Failure | None) -> str:
    """Return why a generation ended, including a cause that became known after it had closed."""
    if not closing.is_unexplained or cause is None or not cause.kind.is_cause:
        return closing.reason
    return f"{cause.summary} (first seen: {closing.reason})"


def _await_quorum(
    policy: RendezvousPolicy,
    view: View,
    nodes: Sequence[NodeRecord],
    leader_state: LeaderState,
    now_s: float,
) -> Decision:
    leader_state, until_s = wait(leader_state, "quorum", now_s, policy.quorum_timeout_s)
    are = "is" if len(nodes) == 1 else "are"
    message = f"waiting for nodes: {len(nodes)} of at least {policy.min_nodes} {are} here"
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
    # The last nodes to leave wait for no others.
    return Decision(leader_state, again_at_s=until_s, message=message if nodes else "")


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


def _step(commit: SnapshotCommit | None) -> int:
    return commit.snapshot.step if commit else 0


def _holders_that_may_return(
    view: View, committed: SnapshotCommit | None, resume: SnapshotCommit | None
) -> tuple[Member, ...]:
    """Return the lost nodes whose return would keep the committed snapshot."""
    if committed is None or (resume and _step(resume) >= _step(committed)):
        return ()
    lost = [holder for holder in committed.holders if holder.node not in view.nodes]
    awaited = tuple(
        holder
        for holder in lost
        if holder.node not in view.evictions and holder.agent not in view.gone
    )
    gone = Counter(holder.group for holder in lost if holder not in awaited)
    return () if any(count > committed.parity for count in gone.values()) else awaited


def _release(
    view: View,
    old: Generation,
    present: Sequence[NodeRecord],
    resume: SnapshotCommit | None,
) -> ReleaseMembers | None:
    """Let members leave once all have drained and too few stay: the state remains in storage.

    The others' seals are known once they have drained, and may need a leaver's part.
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
