"""Decides which node a job goes on without, and when it cannot go on at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.elastic.rendezvous.actions import Evict, Finish
from keepstep.elastic.rendezvous.failure_budget import FailureCount
from keepstep.elastic.rendezvous.policy import RendezvousPolicy
from keepstep.elastic.rendezvous.rank_assignment import assign_ranks, eligible, rank_limits
from keepstep.elastic.rendezvous.records import (
    Eviction,
    FailureKind,
    Generation,
    Limits,
    NodeRecord,
    Result,
)
from keepstep.elastic.rendezvous.standstill import cause_by_monitor
from keepstep.elastic.rendezvous.view import View


def end_failures(
    policy: RendezvousPolicy, view: View, failures: FailureCount
) -> Evict | Finish | None:
    """Return the action that ends a row of failures; None if the node to blame is evicted already.

    A repeated error of the user's script ends the job. If all failures were on one node and enough
    others are left, the job goes on without it.
    """
    cause, node = failures.cause, failures.node
    assert cause is not None, "a row of failures ends with a failure"
    if failures.repeats:
        again = f"twice: {cause.error or failures.error}; another attempt would end the same way"
        named = (
            cause_by_monitor(view.current_verdicts) if cause.kind is FailureKind.STANDSTILL else ""
        )
        return Finish(Result(False, _noted(cause.message, f"{again}; {named}" if named else again)))
    if node in view.evictions:
        return None
    plural = "s" if policy.max_restarts != 1 else ""
    restarts = f"after {policy.max_restarts} restart{plural} without progress"
    if node and can_do_without(policy, view, node):
        return Evict(node, Eviction(f"{cause.summary} ({restarts})", may_return=True))
    return Finish(Result(False, _noted(cause.message, restarts)))


def _noted(message: str, note: str) -> str:
    """Add a note to the first line of a message, which a traceback may follow."""
    first, newline, rest = message.partition("\n")
    return f"{first} ({note}){newline}{rest}"


def can_do_without(limits: RendezvousPolicy | Limits, view: View, node: str) -> bool:
    """Whether enough other nodes are left for another generation."""
    others = [record for record in eligible(view) if record.node != node]
    enough = assign_ranks((), others, limits.max_nodes, rank_limits(view))
    return len(enough) >= limits.min_nodes


def evict_wrong_replica(
    policy: RendezvousPolicy, view: View, generation: Generation, records: Sequence[NodeRecord]
) -> Evict | None:
    """Return the eviction of a node that is known to have computed wrongly, if it can be spared."""
    for record in records:
        comparison = record.replica_comparison
        for rank in comparison.to_replace if comparison else ():
            node = next(member.node for member in generation.members if rank in member.ranks)
            is_here = node in view.nodes and node not in view.evictions
            if comparison and is_here and can_do_without(policy, view, node):
                return Evict(node, Eviction(comparison.finding, may_return=True))
    return None
