"""Defines the actions of a leader: one at a time, each performed as one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.elastic.rendezvous.records import (
    AbortOrder,
    CheckpointRecord,
    Closing,
    Eviction,
    Generation,
    History,
    PersistRequest,
    Release,
    Result,
    SnapshotCommit,
)


@dataclass(frozen=True, slots=True)
class Open:
    """Publish the next generation; its resume point becomes the committed snapshot."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Close:
    """Declare the current generation over."""

    closing: Closing


@dataclass(frozen=True, slots=True)
class OrderAbort:
    """Let the workers of a closing generation abort their collectives: all are fenced."""

    order: AbortOrder


@dataclass(frozen=True, slots=True)
class Commit:
    """Record that a snapshot is complete on all its holders."""

    commit: SnapshotCommit


@dataclass(frozen=True, slots=True)
class Persist:
    """Ask the holders of the committed snapshot to write it to storage."""

    request: PersistRequest


@dataclass(frozen=True, slots=True)
class Publish:
    """All parts are written: commit the stored checkpoint.

    `revision` is that of the request's key, which names the attempt that wrote the parts.
    """

    request: PersistRequest
    parts: tuple[Mapping[str, object], ...]
    revision: int

    @property
    def is_stored(self) -> bool:
        """Whether a holder found the checkpoint committed, so that no manifest is to be written."""
        return any("stored" in part for part in self.parts)


@dataclass(frozen=True, slots=True)
class CancelPersist:
    """A holder could not write its part: drop the request; a later step brings a new one.

    `count` is how many attempts in a row have failed, this one included.
    """

    request: PersistRequest
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ReleaseMembers:
    """Let members leave that want to, because too few stay to go on."""

    release: Release


@dataclass(frozen=True, slots=True)
class RecordLoaded:
    """Record the checkpoint of an earlier launch from which the job has resumed."""

    checkpoint: CheckpointRecord


@dataclass(frozen=True, slots=True)
class RecordRecovery:
    """Add a completed recovery to the history."""

    history: History


@dataclass(frozen=True, slots=True)
class Evict:
    """Ask a node to leave because the job fails on it again and again."""

    node: str
    eviction: Eviction


@dataclass(frozen=True, slots=True)
class Finish:
    """End the job."""

    result: Result


Action = (
    Open
    | Close
    | OrderAbort
    | Commit
    | Persist
    | Publish
    | CancelPersist
    | ReleaseMembers
    | RecordLoaded
    | RecordRecovery
    | Evict
    | Finish
)
