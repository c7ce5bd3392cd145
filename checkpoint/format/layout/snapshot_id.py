"""Names snapshots of a job's state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """A snapshot's name: generations order first, then steps."""

    generation: int
    step: int
