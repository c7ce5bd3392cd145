"""Plays the job's storage: parts of checkpoints, and manifests that make them checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from tests.sim.rules import must

Shard = tuple[SnapshotId, int]
"""A shard's content: which snapshot's, and whose."""


class StorageError(Exception):
    """A part or a manifest was refused."""


class Storage:
    """One directory a snapshot; a manifest is created once, as the stored format does."""

    def __init__(self) -> None:
        self._manifests: dict[SnapshotId, tuple[Mapping[str, object], ...]] = {}

    @property
    def newest(self) -> SnapshotId | None:
        """The newest checkpoint."""
        return max(self._manifests, key=lambda s: (s.step, s.generation), default=None)

    def holds(self, snapshot: SnapshotId) -> bool:
        """Whether a snapshot is stored."""
        return snapshot in self._manifests

    def write_part(self, snapshot: SnapshotId, shards: Sequence[Shard]) -> Mapping[str, object]:
        """Write one holder's shards; return the part's entry, or that there is a manifest."""
        if snapshot in self._manifests:
            return {"stored": True}
        return {"entry": [[s.generation, s.step, rank] for s, rank in shards]}

    def publish(
        self, snapshot: SnapshotId, parts: Sequence[Mapping[str, object]], world_size: int
    ) -> None:
        """Create the manifest; the same one may be created twice."""
        before = self._manifests.setdefault(snapshot, tuple(parts))
        if before != tuple(parts):
            raise StorageError(f"{snapshot} was committed with other content")
        shards = sorted(
            (SnapshotId(generation, step), rank)
            for part in parts
            for generation, step, rank in part["entry"]  # type: ignore[attr-defined]
        )
        must(
            shards == [(snapshot, rank) for rank in range(world_size)],
            "a checkpoint has every shard of its snapshot, and no other",
        )
