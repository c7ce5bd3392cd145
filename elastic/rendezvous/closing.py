"""Decides when a generation closes, and how it ends. Pure.

A generation closes in good order, so that its last snapshot is committed, or by an abort. Where an
abort may leave garbage, it is ordered only once no rank can seal any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from keepstep.elastic.rendezvous import standstill
from keepstep.elastic.rendezvous.actions import Close, OrderAbort
from keepstep.elastic.rendezvous.decision import Decision, LeaderState, wait
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_assignment import (
    assign_ranks,
    eligible,
    newest_known_commit,
    rank_limits,
    records_in,
)
from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    Closing,
    Failure,
    FailureKind,
    Generation,
    NodePhase,
    NodeRecord,
)
from keepstep.elastic.rendezvous.view import View


def reason_to_close(
    policy: RendezvousPolicy,
    view: View,
    generation: Generation,
    present: Sequence[NodeRecord],
    wall_s: float,
) -> Closing | None:
    """Return why and how a running generation closes; None if it goes on.

    Args:
        policy: the job's limits.
        view: the coordinator's content.
        generation: the one that runs.
        present: the records of its members that are present.
        wall_s: wall-clock seconds.
    """
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
    failures = [record.failure for record in records_in(present, generation) if record.failure]
    evidence_until = standstill.evidence_until_s(generation, present, failures)
    if evidence_until is not None and wall_s < evidence_until:
        failures = []
    here = {record.node for record in present}
    lost = [member.node for member in generation.members if member.node not in here]
    if lost and not any(failure.kind.is_cause for failure in failures):
        # A lost node explains the broken collectives.
        since_s = min((failure.at_s for failure in failures), default=wall_s)
        return Closing(number, f"lost {', '.join(lost)}", True, since_s)
    if failures:
        first = _close_reason(failures)
        named = (
            standstill.cause_by_monitor(view.current_verdicts)
            if first.kind is FailureKind.STANDSTILL
            else ""
        )
        return Closing(
            number,
            f"{first.summary}; {named}" if named else first.summary,
            True,
            min(failure.at_s for failure in failures),
            is_unexplained=first.kind is FailureKind.PEER,
        )
    again = _joined_again(generation, present)
    if again is not None:
        return Closing(number, f"{again} joined again", True, wall_s)
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


def admit_spares(
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
    # Also where a larger node takes a member's place: another one may be about to join.
    if len(joining) != room:
        leader_state, until_s = wait(
            leader_state, f"last call after {len(joining)} spares", now_s, policy.last_call_s
        )
        if now_s < until_s:
            return Decision(
                leader_state,
                again_at_s=until_s,
                message="1 node joins soon"
                if len(joining) == 1
                else f"{len(joining)} nodes join soon",
            )
    verb = "joins" if len(joining) == 1 else "join"
    reason = f"{', '.join(joining)} {verb}"
    return Decision(LeaderState(), Close(Closing(generation.generation, reason, False, wall_s)))


def draining(present: Iterable[NodeRecord], generation: Generation) -> list[str]:
    """Return the nodes whose workers may still write in a generation that closes."""
    return [
        record.node
        for record in present
        if record.generation != generation.generation
        or record.phase not in (NodePhase.DRAINED, NodePhase.DONE)
    ]


def order_abort(view: View, old: Generation, present: Sequence[NodeRecord]) -> OrderAbort | None:
    """Return the order to abort, once every member whose workers may still write is fenced.

    An aborted collective returns garbage, also to peers that have not aborted, and nothing raises
    there. So no rank may still be able to seal when the first one aborts.
    """
    undrained = set(draining(present, old))
    writing = [record for record in present if record.node in undrained]
    is_fenced = all(record.fenced == old.generation for record in writing)
    if view.abort_order is not None or not writing or not is_fenced:
        return None
    all_fenced = len(present) == len(old.members)
    return OrderAbort(AbortOrder(old.generation, all_fenced, newest_known_commit(present, old)))


def break_off(view: View, old: Generation, present: Sequence[NodeRecord]) -> Closing | None:
    """Return how a generation closes that breaks while it closes in good order.

    Its ranks wait for the commit of their last snapshot, which then never comes.
    """
    closing = view.closing
    if closing is None or closing.abort:
        return None
    here = {record.node for record in present}
    lost = [member.node for member in old.members if member.node not in here]
    failures = [record.failure for record in records_in(present, old) if record.failure]
    if lost:
        why = f"lost {', '.join(lost)}"
    elif failures:
        why = _close_reason(failures).summary
    else:
        return None
    return replace(closing, abort=True, reason=f"{closing.reason}; then {why}")


def _close_reason(failures: Sequence[Failure]) -> Failure:
    """Return the failure that is a generation's reason: the first cause, else the first of all.

    A script's exception during a standstill says more than the standstill.
    """
    return min(
        failures,
        key=lambda failure: (
            not failure.kind.is_cause,
            failure.kind is FailureKind.STANDSTILL,
            failure.at_s,
        ),
    )


def _is_finishing(present: Iterable[NodeRecord]) -> bool:
    """Whether a node has done its last step, so that another generation would be in vain."""
    return any(record.finishing or record.phase is NodePhase.DONE for record in present)


def _joined_again(generation: Generation, present: Sequence[NodeRecord]) -> str | None:
    """Return a member whose workers have stopped although the generation is open."""
    drained = (r.node for r in records_in(present, generation) if r.phase is NodePhase.DRAINED)
    return next(drained, None)
