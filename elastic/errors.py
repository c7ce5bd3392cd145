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
