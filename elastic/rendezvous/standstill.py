"""Decides when a job stands still, and when its leader has enough evidence to end that. Pure.

All ranks step together, so one that hangs stops them all, and each node sees that on its own ranks.
A node reports a standstill with the stacks of its ranks. The leader closes the generation once all
members have reported, or after `EVIDENCE_S`: the stack that shows the cause may be another node's.
The next generation resumes from memory. If it stands still at the same place, the job ends
(`keepstep.elastic.rendezvous.failure_budget`).

A standstill is time without a step. A rank's activity meanwhile is ignored, since a rank in an
endless loop looks like one that computes. Before the first step of the job there is no limit:
compilation may take any time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keepstep.elastic.rendezvous.records import (
    Failure,
    FailureKind,
    Generation,
    NodeRecord,
    PublishedVerdict,
)

EVIDENCE_S = 15.0
"""Seconds that the leader waits for the stacks of the other members; each takes one or two."""
_MOST_MESSAGES = 8
"""Nodes whose stacks are reported: in a large job most ranks wait in the same place."""


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Progress of one node's ranks in a generation that runs. Times are monotonic seconds.

    Attributes:
        progressed_s: when one of them last completed a step, entered or left a guard, or had its
            state restored.
        has_stepped: whether one of them has completed a step of this generation.
        first_step_s: the longest time that the first step of an earlier generation took after the
            state was restored; None if this node knows of none.
    """

    progressed_s: float
    has_stepped: bool
    first_step_s: float | None


def overdue_at_s(progress: NodeProgress, limit_s: float) -> float | None:
    """Return when a node's ranks will have stood still for too long, unless one makes progress.

    Args:
        progress: of the node.
        limit_s: how long they may; 0: for ever.

    Returns:
        Monotonic seconds; None: there is no limit.
    """
    if limit_s <= 0:
        return None
    if progress.has_stepped:
        return progress.progressed_s + limit_s
    if progress.first_step_s is None:
        return None
    return progress.progressed_s + progress.first_step_s + limit_s


def evidence_until_s(
    generation: Generation, present: Sequence[NodeRecord], failures: Collection[Failure]
) -> float | None:
    """Return the leader's deadline for the evidence of further members.

    Args:
        generation: the one that runs.
        present: the records of its members.
        failures: what they report.

    Returns:
        Wall-clock seconds; None if it has no reason to wait.
    """
    if not failures or any(failure.kind is not FailureKind.STANDSTILL for failure in failures):
        return None
    if len(failures) >= sum(record.generation == generation.generation for record in present):
        return None
    return min(failure.at_s for failure in failures) + EVIDENCE_S


def joint_failure(failures: Sequence[Failure]) -> Failure:
    """Return the first failure with the evidence of all; one of a standstill must be among them."""
    ordered = sorted(
        (failure for failure in failures if failure.kind is FailureKind.STANDSTILL),
        key=lambda failure: failure.at_s,
    )
    first = ordered[0]
    messages = [failure.message for failure in ordered[:_MOST_MESSAGES]]
    if len(ordered) > _MOST_MESSAGES:
        messages.append(f"and {len(ordered) - _MOST_MESSAGES} more nodes; see their logs")
    return Failure(first.kind, "\n".join(messages), first.at_s, first.rank)


def cause_by_monitor(verdicts: Sequence[PublishedVerdict]) -> str:
    """Return the suspect that the monitor names for a standstill, in one line; "" without one."""
    standing = [verdict for verdict in verdicts if verdict.cost_s_per_step is None]
    if not standing:
        return ""
    likeliest = max(standing, key=lambda verdict: verdict.confidence)
    evidence = f" ({likeliest.evidence[0]})" if likeliest.evidence else ""
    return f"the monitor names {likeliest.subject}: {likeliest.syndrome}{evidence}"
