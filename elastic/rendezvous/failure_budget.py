"""Counts generations in a row that failed without progress, and finds the node to blame.

Pure. The cause counts: a worker's failure, or broken collectives that nothing explains. The loss of
a node breaks its peers' collectives; that is no failure of theirs, and does not count. Nor does the
restart of a script: each of many ranks may restart in another generation.

An exception of the user's script that the same line raises in the same step as before is not worth
a third attempt. Nor is a job that stands still for a second time without progress in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.elastic.rendezvous.records import (
    Failure,
    FailureKind,
    Generation,
    NodeRecord,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.standstill import joint_failure
from keepstep.elastic.rendezvous.view import View

BEFORE_FIRST_STEP = "before the first step"
"""The end of `Failure.error` if no step of the generation was begun."""


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failures in a row without progress.

    Attributes:
        count: how many generations in a row failed.
        node: the node on which all of them did; "" if there are several, or it is unknown.
        cause: the failure that ended the last generation; None if none that counts did.
        reached: the step to resume from; a later one next time is progress.
        error: the last exception of the user's script, in a form that is equal for a repetition.
        repeats: the last generation ended with the same error as the failed one before it.
    """

    count: int
    node: str
    cause: Failure | None
    reached: int
    error: str = ""
    repeats: bool = False


def count_failures(
    view: View, old: Generation, present: Sequence[NodeRecord], resume: SnapshotCommit | None
) -> FailureCount:
    """Count the end of a generation.

    Args:
        view: the leader's view.
        old: the generation that ends.
        present: the records of its members that are still present.
        resume: the snapshot in memory that the next one will resume from.
    """
    stored = view.checkpoint.step if view.checkpoint is not None else 0
    reached = resume.snapshot.step if resume is not None else stored
    cause, node = _cause(old, present)
    if cause is None:
        return FailureCount(old.failures, old.failing_node, None, reached, old.last_error)
    error = cause.error
    steps = (record.step for record in present if record.generation == old.generation)
    step = max(steps, default=0)
    is_elsewhere_next = any(member.node in view.evictions for member in old.members)
    if cause.kind is FailureKind.STANDSTILL and step and not is_elsewhere_next:
        # The node that reports it first may differ, and so may the snapshots that its ranks could
        # still seal.
        error = f"the job stood still after step {step}"
    elif error.endswith(BEFORE_FIRST_STEP):
        # It is a repetition only if no progress lies between the two.
        error = f"{error} after step {old.reached}"
    repeats = bool(error) and error == old.last_error
    if reached > old.reached or old.failures == 0:
        return FailureCount(1, node, cause, reached, error, repeats)
    same = node if node == old.failing_node else ""
    return FailureCount(old.failures + 1, same, cause, reached, error, repeats)


def _cause(old: Generation, present: Sequence[NodeRecord]) -> tuple[Failure | None, str]:
    """Return the failure that ended a generation, and the node where it was."""
    failed = [
        (record.failure, record.node)
        for record in present
        if record.generation == old.generation and record.failure is not None
    ]
    causes = [pair for pair in failed if pair[0].kind.is_cause]
    if causes:
        first, node = min(
            causes, key=lambda pair: (pair[0].kind is FailureKind.STANDSTILL, pair[0].at_s)
        )
        if first.kind is not FailureKind.STANDSTILL:
            return first, node
        # All nodes stand still, and the cause is not known.
        return joint_failure([failure for failure, _ in causes]), ""
    is_explained = any(failure.kind is FailureKind.RESTART for failure, _ in failed)
    if not failed or is_explained or len(present) < len(old.members):
        return None, ""
    return min(failed, key=lambda pair: pair[0].at_s)[0], ""
