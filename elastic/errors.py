"""The errors of the elastic package. Each message names what failed, where, and the remedy."""

from __future__ import annotations


class ElasticError(Exception):
    """Base of all errors that keepstep raises on purpose."""


class UsageError(ElasticError):
    """The command line, the environment or the API was used in a way that cannot work."""


class StoreUnavailable(ElasticError):
    """No endpoint of the coordinator answered within the deadline.

    `unknown` is True when a write may or may not have been applied.
    """

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class LeaseLost(ElasticError):
    """The node's lease has ended.

    The node is no longer a member, and must stop its workers before it joins again.
    """


class JobFailed(ElasticError):
    """The job ended in failure: its restart budget is spent, or it lost its quorum for too long."""


class DeviceUnavailable(ElasticError):
    """The job computes on GPUs, and this node has none for one of its workers."""


class ProcessUnusable(ElasticError):
    """This process can enter no other generation; the agent replaces it.

    `is_fault` is True if the cause is here, in a device that failed, and not in a peer's end.
    """

    def __init__(self, message: str, *, is_fault: bool = False) -> None:
        super().__init__(message)
        self.is_fault = is_fault


class ReplicasDiverged(ElasticError):
    """Ranks that must hold the same state do not, and the job is to stop then."""


class StepRejected(ElasticError):
    """More steps of the training were rejected than the job is to survive (`BadSteps`)."""


class InvariantViolated(ElasticError):
    """Something that the rendezvous promises does not hold. Who finds it stops and writes nothing.

    Attributes:
        invariant: the promise.
        seen: what contradicts it.
    """

    def __init__(self, invariant: str, seen: str) -> None:
        super().__init__(
            f"invariant violated: {invariant}; seen: {seen}. Nothing was written. Save the "
            "coordinator's keys (`keepstep status --json`) and report this; to go on, "
            "restart the job from its newest checkpoint"
        )
        self.invariant = invariant
        self.seen = seen
