"""Opens a stored checkpoint on all ranks, with as many requests as one rank would make.

Rank 0 reads the manifest, what says which tensors there are, and the listings if they are small; it
hands on the bytes. A listing of a large checkpoint is read by one rank, which follows from its
number, and handed on to those that need it. Whoever gets bytes checks them against the manifest, as
if it had read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.stored.metadata import PARALLEL_READS, StoredMetadata
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps, missing, newest
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.ranks.control_group import ControlGroup

_LISTINGS_NBYTES = 2**20
"""All ranks get all listings at once if these have so many bytes at most: it saves messages."""


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


class SharedListings:
    """Listings of a checkpoint, each read by one rank, which keeps it to hand it on again.

    Args:
        source: the checkpoint, the same one on all ranks.
        group: the ranks.
    """

    def __init__(self, source: StoredCheckpoint, group: ControlGroup) -> None:
        self._source = source
        self._group = group
        self._entries = {
            number: entry
            for entry in source.manifest.objects
            if (number := entry.part_number) is not None
        }
        self._read: dict[int, bytes] = {}

    def get(self, boxes: Callable[[], Sequence[tuple[str, Box]]]) -> None:
        """Give the checkpoint what its `locate` needs for these boxes of tensors.

        Args:
            boxes: returns the boxes that this rank is going to locate; if it fails on one rank,
                all ranks raise.

        Raises:
            CheckpointDamaged: a listing is not what was written; on all ranks.
            CheckpointError: a rank could not read one; on all ranks.
        """
        group = self._group
        missing, are_missing = group.run_and_share(
            lambda: self._source.missing_listings(boxes()), lambda own: bool(own) or None
        )
        if not any(are_missing):
            return
        by_reader: list[list[int]] = [[] for _ in range(group.size)]
        for number in missing:
            by_reader[number % group.size].append(number)
        asked = group.all_to_all(
            lambda: {reader: json.dumps(own).encode() for reader, own in enumerate(by_reader)}
        )
        answers = group.all_to_all(lambda: dict(enumerate(self._answers(asked))))
        group.run_on_all_ranks(lambda: self._hold(by_reader, answers))

    def _answers(self, asked: Sequence[memoryview]) -> list[bytes]:
        """Read what the ranks have asked this one for; return the bytes for each of them."""
        by_rank: list[list[int]] = [json.loads(bytes(numbers)) for numbers in asked]
        wanted = sorted({n for numbers in by_rank for n in numbers} - self._read.keys())
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            contents = pool.map(lambda n: self._source.verified(self._entries[n].name), wanted)
            self._read.update(zip(wanted, contents, strict=True))
        return [b"".join(self._read[n] for n in numbers) for numbers in by_rank]

    def _hold(self, by_reader: Sequence[Sequence[int]], answers: Sequence[memoryview]) -> None:
        for numbers, answer in zip(by_reader, answers, strict=True):
            start = 0
            for number in numbers:
                entry = self._entries[number]
                self._source.hold(entry, bytes(answer[start : start + entry.nbytes]))
                start += entry.nbytes
