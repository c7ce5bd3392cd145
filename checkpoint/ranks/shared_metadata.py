"""Opens a stored checkpoint on all ranks: rank 0 reads its metadata and broadcasts the bytes.

These are the manifest, the tensors, the documents, and the listings up to `_LISTINGS_NBYTES` in
all. Beyond that each rank reads the listings that it needs by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.stored.metadata import StoredMetadata
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps, missing, newest
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.ranks.control_group import ControlGroup

_LISTINGS_NBYTES = 16 * 2**20
"""All ranks get all listings at once if these have so many bytes at most."""


def open_together(
    storage: Storage, group: ControlGroup, step: int | None = None, generation: int | None = None
) -> StoredCheckpoint:
    """Open a checkpoint on all ranks.

    Args:
        storage: as for `StoredCheckpoint.open`.
        group: the ranks.
        step: as for `StoredCheckpoint.open`.
        generation: as for `StoredCheckpoint.open`.

    Raises:
        CheckpointError: as `StoredCheckpoint.open` does, the same on all ranks.
    """
    if group.size == 1:
        return StoredCheckpoint.open(storage, step, generation)
    message = group.broadcast(lambda: _encode(_read(storage, step, generation)))
    return group.run_on_all_ranks(lambda: _of(storage, _decode(message), group))


@dataclass(frozen=True, slots=True, eq=False)
class FoundCheckpoint:
    """A checkpoint that rank 0 has found; all ranks have its metadata, or know of its damage."""

    storage: Storage
    stored: StoredStep
    group: ControlGroup
    encoded_metadata: Sequence[memoryview] = ()
    damage: str | None = None

    def open(self) -> StoredCheckpoint:
        """Return the checkpoint; all ranks must call it.

        They share the check of the documents; if it fails on any rank, all raise.

        Raises:
            CheckpointDamaged: its metadata is not what was written.
            CheckpointTooNew: it has a newer format than this release reads.
        """
        if self.damage is not None:
            raise CheckpointDamaged(self.damage)
        if not self.encoded_metadata:
            return StoredCheckpoint.open(self.storage, self.stored.step, self.stored.generation)
        group = self.group
        return group.run_on_all_ranks(
            lambda: _of(self.storage, _decode(self.encoded_metadata), group)
        )


def find_together(
    storage: Storage, group: ControlGroup, step: int | None = None
) -> FoundCheckpoint | None:
    """Find the newest checkpoint on rank 0, and hand on its metadata at once.

    So all ranks load the same one even if a new one appears now.

    Args:
        storage: may have checkpoints.
        group: the ranks.
        step: only checkpoints of this step; None for any.

    Returns:
        The checkpoint; None if there is none at all.

    Raises:
        CheckpointMissing: there are checkpoints, but none of this step.
        CheckpointError: rank 0 could not look or read, but for damage; on all ranks.
    """

    def find() -> StoredStep | None:
        if step is None:
            return newest(storage)
        steps = list_steps(storage)
        if steps and all(stored.step != step for stored in steps):
            raise missing(storage, step)
        return next((stored for stored in steps if stored.step == step), None)

    def read() -> list[bytes]:
        stored = find()
        if stored is None:
            return []
        name = json.dumps([stored.step, stored.generation]).encode()
        if group.size == 1:
            return [name]
        try:
            return [name, *_encode(_read(storage, stored.step, stored.generation))]
        except CheckpointDamaged as error:
            return [name, str(error).encode()]

    message = group.broadcast(read)
    if not message:
        return None
    stored, content = StoredStep(*json.loads(bytes(message[0]))), message[1:]
    if len(content) == 1:
        return FoundCheckpoint(storage, stored, group, damage=bytes(content[0]).decode())
    return FoundCheckpoint(storage, stored, group, content)


def _of(storage: Storage, metadata: StoredMetadata, group: ControlGroup) -> StoredCheckpoint:
    return StoredCheckpoint.of(storage, metadata, rank=group.rank, world_size=group.size)


def _read(storage: Storage, step: int | None, generation: int | None) -> StoredMetadata:
    return StoredMetadata.read(
        storage, step, generation, for_all_ranks=True, listings_nbytes=_LISTINGS_NBYTES
    )


def _encode(metadata: StoredMetadata) -> list[bytes]:
    stored, names = metadata.stored, list(metadata.objects)
    head = json.dumps([stored.step, stored.generation, names]).encode()
    return [head, metadata.manifest, *(metadata.objects[name] for name in names)]


def _decode(message: Sequence[memoryview]) -> StoredMetadata:
    head, manifest, *contents = map(bytes, message)
    step, generation, names = json.loads(head)
    objects = dict(zip(names, contents, strict=True))
    return StoredMetadata(StoredStep(step, generation), manifest, objects)
