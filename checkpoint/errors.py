"""The errors of the checkpoint package. Each message says what happened, to which tensor or object, and what to do next."""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors that the checkpoint package raises on purpose."""


class CheckpointMissing(CheckpointError):
    """No committed checkpoint, or no snapshot of that step, is there."""


class CheckpointDamaged(CheckpointError):
    """Stored bytes do not match their checksum, or an object is missing or has the wrong size."""


class CheckpointExists(CheckpointError):
    """That step was already committed; committed steps are never overwritten."""


class LayoutMismatch(CheckpointError):
    """The state to fill and the state to read do not fit: names, shapes or dtypes differ."""


class StateChanged(CheckpointError):
    """State was written to while it was being copied; what was copied was thrown away."""


class SnapshotUnavailable(CheckpointError):
    """A snapshot server could not be reached, refused, or no longer holds what was asked."""
