"""Errors of the checkpoint package.

Each message states what happened, to which tensor or object, and what to do next.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base class of the errors of the checkpoint package."""


class CheckpointMissing(CheckpointError):
    """There is no committed checkpoint, or no snapshot of the requested step."""


class CheckpointDamaged(CheckpointError):
    """Stored bytes do not match their checksum, or an object is missing or has the wrong size."""


class CheckpointTooNew(CheckpointError):
    """The checkpoint has a newer format than this keepstep reads; it may well be intact."""


class FormatUnsupported(CheckpointError):
    """Files are in no format that keepstep reads, or use something of one that it does not read."""


class CheckpointExists(CheckpointError):
    """The step is committed already; committed steps are never overwritten."""


class RankFailed(CheckpointError):
    """Another rank could not do its share; the message is that of the first one."""


class ProcessEnded(CheckpointError):
    """A process that keepstep had started for a save was ended, as when memory ran out."""


class LayoutMismatch(CheckpointError):
    """The state to fill and the state to read differ in names, shapes or dtypes."""


class RulesInvalid(CheckpointError):
    """A rule file cannot be used, or contradicts the configuration or tensors it is applied to."""


class StateChanged(CheckpointError):
    """State was written to while it was being copied; the copy was discarded."""


class SnapshotUnavailable(CheckpointError):
    """A snapshot server could not be reached, refused, or no longer holds the requested data."""


class MemoryShort(SnapshotUnavailable):
    """The node has too little memory for a snapshot or its parity; it may have enough later."""


class SnapshotInvariantViolated(CheckpointError):
    """Something that keepstep promises about its own state does not hold; the change is refused.

    Attributes:
        invariant: the promise.
        seen: what contradicts it.
    """

    def __init__(self, invariant: str, seen: str) -> None:
        super().__init__(
            f"invariant violated: {invariant}; seen: {seen}. The change was refused and nothing "
            "was overwritten; report this, and restart the node to go on"
        )
        self.invariant = invariant
        self.seen = seen
