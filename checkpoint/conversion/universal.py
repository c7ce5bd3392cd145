"""Writes a checkpoint of any source in the universal format, part by part, so that it can go on.

The name of the attempt depends on what is converted alone, so a conversion that was interrupted is
taken up by the next one. It reads what the parts written before should have: if the source has
changed meanwhile, they are written again.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import crc32c
import numpy as np

from keepstep.checkpoint.content_check import check_content, content_of
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.layout.content_digest import DIGEST, chunk_hash, digest_document, sum_of
from keepstep.checkpoint.layout.documents import PROVENANCE
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.release import release_of
from keepstep.checkpoint.layout.source import BoxRequest, Source, TensorSpec
from keepstep.checkpoint.stored.chunking import CHUNK_NBYTES, ChunkPlan, plan_chunks
from keepstep.checkpoint.stored.manifest import StoredObject
from keepstep.checkpoint.stored.metadata import StoredMetadata
from keepstep.checkpoint.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import Storage, open_storage
from keepstep.checkpoint.stored.stored_json import decode, encode
from keepstep.checkpoint.stored.strict_json import to_strict_json
from keepstep.checkpoint.stored.writer import (
    PARALLEL_WRITES,
    commit,
    contents,
    manifest_of,
    write_part,
)
from keepstep.checkpoint.stored.zarr_metadata import required_features

PART_NBYTES = 256 * 2**20
"""About how much is written at once; so much is written again after an interruption."""

# A chunk as it is read, once more as it is written, and what its reads of the source need.
_THREAD_NBYTES = 3 * CHUNK_NBYTES

Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _WrittenPart:
    """What an attempt notes of a part when it is durable: its listing, its contents' hash."""

    listing: StoredObject
    content: int

    def encode(self) -> bytes:
        return encode({"listing": self.listing.to_json(), "content": self.content})

    @classmethod
    def decode(cls, data: bytes, where: str) -> _WrittenPart:
        noted = decode(data, where)
        try:
            if not isinstance(noted["content"], int):
                raise TypeError(f"content {noted['content']!r:.99}")
            return cls(StoredObject.from_json(noted["listing"]), noted["content"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where} does not note what was written: {error!r}; remove it, and convert again"
            ) from error


def write_universal(
    source: Source,
    url: str,
    *,
    origin: str,
    converted_from: str,
    now: datetime,
    memory_nbytes: int,
    report: Report = lambda nbytes: None,
) -> StoredStep:
    """Write a checkpoint in the universal format, verify it, and return its name.

    Args:
        source: what to write; of generation 0.
        url: where to write.
        origin: identifies what is converted, and how: an interrupted conversion of the same goes
            on where it ended.
        converted_from: the source's format, in words.
        now: the time, to note when the checkpoint was written.
        memory_nbytes: how much memory tensors may take meanwhile.
        report: called with the bytes of tensors that are done, from several threads.

    Raises:
        CheckpointExists: the target has this step already.
        CheckpointError: the memory is too little, a read or a write failed, or what was written is
            not what was read.
    """
    threads = min(PARALLEL_WRITES, memory_nbytes // _THREAD_NBYTES)
    if threads < 1:
        raise CheckpointError(
            f"a conversion needs {_THREAD_NBYTES / 2**20:.0f} MiB of memory at least, "
            f"{memory_nbytes / 2**20:.0f} are given; give more"
        )
    stored = StoredStep(source.step, 0)
    attempt = Attempt(
        stored, f"convert-{hashlib.blake2b(origin.encode(), digest_size=8).hexdigest()}"
    )
    storage = open_storage(url)
    plan = plan_chunks(list(_parts(source.tensors)))
    written = [
        _written_before(source, storage, attempt, plan, number, report)
        or _write(source, storage, attempt, plan, number, threads, report)
        for number in range(len(plan.chunks))
    ]
    documents = {
        **source.documents,
        PROVENANCE: {
            "keepstep": release_of("keepstep"),
            "torch": release_of("torch"),
            "world_size": 1,
            "saved_at": now.astimezone(UTC).isoformat(timespec="seconds"),
            "converted_from": converted_from,
        },
        DIGEST: digest_document(sum_of(part.content for part in written)),
    }
    listings = [part.listing for part in written]
    objects = contents(
        stored, listings, plan.tensors, plan.chunk_parts(), encode(to_strict_json(documents))
    )
    required = required_features(plan.tensors)
    manifest = manifest_of(attempt, listings, objects, required).encode()
    try:
        # Before the manifest is written: nobody sees what is not what was read.
        check_content(
            StoredCheckpoint.of(
                url, StoredMetadata(stored=stored, manifest=manifest, objects=objects)
            )
        )
    except CheckpointDamaged:
        # Without their notes, the next conversion writes the parts anew.
        _delete_notes(storage, attempt, plan)
        raise
    commit(storage, attempt, listings, objects, required)
    _delete_notes(storage, attempt, plan)
    return stored


def _parts(tensors: Mapping[str, TensorSpec]) -> Iterator[ShardIndex]:
    """Yield what each part holds: tensors in order, large ones cut along their first dimension."""
    entries: list[Entry] = []
    nbytes = 0
    for key, spec in tensors.items():
        for box in _cut(spec):
            size = box.size * numpy_dtype(spec.dtype).itemsize
            if entries and nbytes + size > PART_NBYTES:
                yield ShardIndex(nbytes, tuple(entries), {})
                entries, nbytes = [], 0
            entries.append(
                Entry(
                    key=key,
                    dtype=spec.dtype,
                    global_shape=spec.shape,
                    box=box,
                    byte_offset=nbytes,
                    nbytes=size,
                )
            )
            nbytes += size
    yield ShardIndex(nbytes, tuple(entries), {})


def _cut(spec: TensorSpec) -> Iterator[Box]:
    """Yield boxes of about a part's size, which cover a tensor."""
    whole = Box.whole(spec.shape)
    if not spec.shape or not whole.size:
        yield whole
        return
    row = math.prod(spec.shape[1:]) * numpy_dtype(spec.dtype).itemsize
    rows = max(1, PART_NBYTES // row)
    for first in range(0, spec.shape[0], rows):
        count = min(rows, spec.shape[0] - first)
        yield Box((first, *whole.offset[1:]), (count, *spec.shape[1:]))


def _write(
    source: Source,
    storage: Storage,
    attempt: Attempt,
    plan: ChunkPlan,
    number: int,
    threads: int,
    report: Report,
) -> _WrittenPart:
    hashes: list[int] = []
    lock = threading.Lock()

    def read_box(key: str, box: Box) -> np.ndarray:
        values = np.empty((*box.shape, _itemsize(plan, key)), np.uint8)
        source.read([BoxRequest(key, box, values.reshape(-1).data)])
        chunk = plan.tensors[key].chunk
        place = [start // extent for start, extent in zip(box.offset, chunk, strict=True)]
        hashed = chunk_hash(key, place, crc32c.crc32c(values.reshape(-1).data))
        with lock:
            hashes.append(hashed)
        report(values.nbytes)
        return values

    listing = write_part(storage, attempt, plan, [number], read_box, name=number, threads=threads)
    part = _WrittenPart(listing, sum_of(hashes))
    name = _note_name(attempt, number)
    storage.write(name, [part.encode()])
    storage.flush([name])
    return part


def _written_before(
    source: Source,
    storage: Storage,
    attempt: Attempt,
    plan: ChunkPlan,
    number: int,
    report: Report,
) -> _WrittenPart | None:
    """Return a part that an interrupted conversion wrote, if the source still has its contents."""
    name = _note_name(attempt, number)
    try:
        part = _WrittenPart.decode(storage.read(name), f"{storage.url}/{name}")
    except CheckpointMissing:
        return None
    content = sum_of(content_of(source, [chunk]) for chunk in plan.chunks[number])
    if content != part.content:
        return None
    report(sum(chunk.box.size * _itemsize(plan, chunk.key) for chunk in plan.chunks[number]))
    return part


def _delete_notes(storage: Storage, attempt: Attempt, plan: ChunkPlan) -> None:
    for number in range(len(plan.chunks)):
        storage.delete(_note_name(attempt, number))


def _note_name(attempt: Attempt, number: int) -> str:
    return f"{attempt.directory}/parts/{number:06d}-converted.json"


def _itemsize(plan: ChunkPlan, key: str) -> int:
    return numpy_dtype(plan.tensors[key].dtype).itemsize
