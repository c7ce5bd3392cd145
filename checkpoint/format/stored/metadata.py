"""The metadata of a stored checkpoint: read from storage, or handed on by another rank."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import crc32c

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.stored.manifest import Manifest, StoredObject
from keepstep.checkpoint.format.stored.object_names import (
    CHUNKS,
    DOCUMENTS,
    MANIFEST,
    ROOT,
    StoredStep,
)
from keepstep.checkpoint.format.stored.steps import choose, missing
from keepstep.checkpoint.format.stored.storage import Storage

PARALLEL_READS = 8
"""How many objects of metadata are read at a time."""


@dataclass(frozen=True, slots=True)
class StoredMetadata:
    """The objects of a checkpoint that say which tensors and documents it has.

    Attributes:
        stored: the checkpoint.
        manifest: its manifest, as it is stored.
        objects: contents of objects that the manifest lists, by name; they match their checksums.
    """

    stored: StoredStep
    manifest: bytes
    objects: Mapping[str, bytes]

    @classmethod
    def read(
        cls,
        storage: Storage,
        step: int | None = None,
        generation: int | None = None,
        *,
        for_all_ranks: bool = False,
        listings_nbytes: int = 0,
    ) -> StoredMetadata:
        """Read what `StoredCheckpoint.of` needs.

        Args:
            storage: as for `StoredCheckpoint.open`.
            step: as for `StoredCheckpoint.open`.
            generation: as for `StoredCheckpoint.open`.
            for_all_ranks: read also what tells which listing has a chunk.
            listings_nbytes: read the listings as well if they have so many bytes at most, in all.
                One that cannot be read is left out: maybe nobody needs it.

        Raises:
            CheckpointMissing: there is no such checkpoint.
            CheckpointDamaged: its metadata is not what was written.
            CheckpointTooNew: it has a newer format than this release reads.
        """
        chosen = choose(storage, step, generation)
        try:
            content = storage.read(f"{chosen.directory}/{MANIFEST}")
        except CheckpointMissing:
            raise missing(storage, step) from None
        manifest = decode_manifest(storage, chosen, content)
        names = [DOCUMENTS, ROOT]
        if for_all_ranks:
            names.append(CHUNKS)
        listings = [entry for entry in manifest.objects if entry.is_part]
        if sum(entry.nbytes for entry in listings) > listings_nbytes:
            listings = []

        def read_listing(name: str) -> bytes | None:
            try:
                return read_verified(storage, manifest, name)
            except CheckpointError:
                return None

        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            contents = pool.map(lambda name: read_verified(storage, manifest, name), names)
            listed = pool.map(read_listing, [entry.name for entry in listings])
            objects = dict(zip(names, contents, strict=True))
            objects.update(
                (entry.name, data)
                for entry, data in zip(listings, listed, strict=True)
                if data is not None
            )
            return cls(chosen, content, objects)


def read_verified(storage: Storage, manifest: Manifest, name: str) -> bytes:
    """Return the content of an object that the manifest lists, checked against its entry.

    Raises:
        CheckpointDamaged: the object is not what was written.
    """
    where = f"{storage.url}/{manifest.directory}/{name}"
    entry = entry_of(storage, manifest, name)
    try:
        data = storage.read(f"{manifest.directory}/{name}", entry.nbytes)
    except CheckpointMissing:
        raise CheckpointDamaged(f"{where} is missing; load an older step") from None
    check_content(where, entry, data)
    return data


def entry_of(storage: Storage, manifest: Manifest, name: str) -> StoredObject:
    """Return the manifest's entry of an object.

    Raises:
        CheckpointDamaged: it has none.
    """
    entry = manifest.find(name)
    if entry is None:
        raise CheckpointDamaged(
            f"{storage.url}/{manifest.directory}/{name} is not in the manifest; load an older step"
        )
    return entry


def check_content(where: str, entry: StoredObject, data: bytes) -> None:
    """Check an object's content against its entry in the manifest."""
    if len(data) != entry.nbytes:
        raise CheckpointDamaged(
            f"{where} has {len(data)} bytes, not the {entry.nbytes} in the manifest; "
            "load an older step"
        )
    if crc32c.crc32c(data) != entry.crc32c:
        raise CheckpointDamaged(
            f"{where} does not match its checksum, its bytes were changed; load an older step"
        )


def decode_manifest(storage: Storage, stored: StoredStep, content: bytes) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointDamaged: the content is no manifest, or that of another checkpoint.
        CheckpointTooNew: it has a newer format than this release reads.
    """
    where = f"{storage.url}/{stored.directory}/{MANIFEST}"
    manifest = Manifest.decode(content, where)
    if (manifest.step, manifest.generation) != (stored.step, stored.generation):
        raise CheckpointDamaged(
            f"{where} belongs to step {manifest.step}, generation {manifest.generation}; "
            "was it copied here? load an older step"
        )
    return manifest
