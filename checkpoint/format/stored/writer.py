"""Writer of checkpoints: each writer stores its chunks, then one of them publishes the manifest.

This module does no collective and does not import torch, because snapshot servers write too.
Each attempt writes into a directory of its own, which no other attempt ever uses. So a writer that
is late changes nothing that another attempt wrote, and a crash at any time leaves objects that no
manifest names, which readers ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import crc32c
import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import CheckpointError, CheckpointExists, CheckpointMissing
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.content_digest import chunk_hash, sum_of
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.stored.cell_codec import (
    Bytes,
    EncodedCells,
    encode_cells,
    encoded_nbytes,
)
from keepstep.checkpoint.format.stored.chunking import (
    PACK_NBYTES,
    Chunk,
    ChunkPlan,
    StoredTensor,
    cells_over,
)
from keepstep.checkpoint.format.stored.last_part import EqualObjects, LastPart, Paths, WrittenPart
from keepstep.checkpoint.format.stored.listings import (
    ChunkObject,
    DataObject,
    Pack,
    PackedChunk,
    decode_part,
    encode_chunk_parts,
    encode_numbers,
    encode_part,
)
from keepstep.checkpoint.format.stored.manifest import Manifest, PartEntry, StoredObject
from keepstep.checkpoint.format.stored.object_names import (
    CHUNKS,
    DOCUMENTS,
    MANIFEST,
    MODEL,
    NEWEST,
    PARTS,
    REMOVED,
    ROOT,
    Attempt,
    StoredStep,
    chunk_name,
    pack_name,
    part_name,
)
from keepstep.checkpoint.format.stored.pruning import Note
from keepstep.checkpoint.format.stored.steps import newest
from keepstep.checkpoint.format.stored.storage import Storage
from keepstep.checkpoint.format.stored.stored_json import encode, encode_strict
from keepstep.checkpoint.format.stored.transfer_memory import TransferPool
from keepstep.checkpoint.format.stored.zarr_metadata import (
    array_metadata,
    group_metadata,
    required_features,
    root_metadata,
    shard_index,
)

# Each writing thread holds one encoded pack or chunk in memory.
PARALLEL_WRITES = 4

_KEPT_NBYTES = 32 * 2**20
"""Memory that is kept for the next part, at most."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Stored = TypeVar("_Stored", bound=DataObject)

ReadBox = Callable[[str, Box], npt.NDArray[np.uint8]]
"""Returns a box's bytes: an array of the box's shape plus a last axis of one element's bytes.

A thread uses them only until it asks for the next box."""

Piece = bytes | memoryview
"""A contiguous part of an object."""


def write_part(
    storage: Storage,
    attempt: Attempt,
    plan: ChunkPlan,
    writers: Sequence[int],
    read_box: ReadBox,
    *,
    name: int,
    stop: Callable[[], bool] = lambda: False,
    threads: int | None = None,
    memory: TransferPool | None = None,
    with_content: bool = False,
    last: LastPart | None = None,
) -> PartEntry:
    """Write the chunks of these writers and a listing of them, durably; return the listing's entry.

    Objects that equal those that the writer wrote last, or those of the newest checkpoint, such as
    frozen weights, are linked instead of written if the storage supports it.

    The writer of an array's first chunk also writes the array's metadata: there may be thousands of
    arrays, and `publish` runs on one writer while the others wait.

    Args:
        storage: the job's storage.
        attempt: this attempt to write the checkpoint.
        plan: the chunks of all writers.
        writers: positions in the plan of the writers whose chunks are written here.
        read_box: returns the bytes of a box; called from several threads.
        name: number of the listing, unique among the writers of this attempt.
        stop: called before every chunk; True ends the attempt.
        threads: how many objects are written at a time; None for `PARALLEL_WRITES`.
        memory: what objects are encoded into, if parts are written one after the other.
        with_content: whether the entry has the hashes of what `read_box` returns.
        last: what this writer wrote last, if parts are written one after the other.

    Raises:
        CheckpointExists: this step of this generation is committed.
        CheckpointError: a write failed, or the attempt was stopped.
    """
    _check_not_committed(storage, attempt.stored)
    pool = TransferPool() if memory is None else memory
    last = LastPart() if last is None else last
    before = last.at(storage.url) if storage.can_link else None
    # A process that saves in other ways too, or follows another one, may not have written it.
    known = {attempt.stored} if before is None else {attempt.stored, before.stored}
    equal = EqualObjects(before, lambda: _newest_objects(storage, name, known))

    def write(job: _Job) -> DataObject:
        chunks = [job] if isinstance(job, Chunk) else job.chunks
        sizes = [encoded_nbytes(plan.tensors[chunk.key], chunk.box.shape) for chunk in chunks]
        with pool.taken(sum(sizes)) as taken:
            if not isinstance(job, Chunk):
                return store(_pack(job, sizes, taken, encoded), [taken.data])
            stored = store(*_chunk_object(plan, job, encoded(job, taken)))
        if not any(job.place):
            write_metadata(job.key)
        return stored

    def write_metadata(key: str) -> None:
        content = encode(array_metadata(key, plan.tensors[key]))
        storage.write(f"{attempt.directory}/{key}/{ROOT}", [content])

    def store(item: _Stored, pieces: Sequence[Piece]) -> _Stored:
        target = f"{attempt.directory}/{item.name}"
        # Equal checksums do not prove that the bytes are equal; the storage compares them.
        if not any(storage.link(source, target, pieces) for source in equal.find(item)):
            storage.write(target, pieces)
        return item

    def encoded(chunk: Chunk, into: Bytes) -> EncodedCells:
        if stop():
            raise CheckpointError(
                f"step {attempt.stored.step}: it was not stored, because this attempt was given "
                f"up, or its generation {attempt.stored.generation} is over"
            )
        tensor, values = plan.tensors[chunk.key], read_box(chunk.key, chunk.box)
        cells = encode_cells(tensor, values, into, with_content=with_content)
        if with_content:
            hashes.append(chunk_hash(chunk.key, chunk.place, cells.content))
        return cells

    hashes: list[int] = []
    jobs = list(write_jobs(plan, writers, name))
    try:
        written = _map_parallel(write, jobs, threads)
    finally:
        pool.trim(_KEPT_NBYTES)
    listing = encode_part(written)
    part = PartEntry(part_name(name), len(listing), crc32c.crc32c(listing), sum_of(hashes))
    storage.write(f"{attempt.directory}/{part.name}", [listing])
    arrays = [job.key for job in jobs if isinstance(job, Chunk) and not any(job.place)]
    names = [*(item.name for item in written), *(f"{key}/{ROOT}" for key in arrays), part.name]
    storage.flush([f"{attempt.directory}/{stored}" for stored in names])
    paths = {item: f"{attempt.directory}/{item.name}" for item in written}
    last.note(storage.url, WrittenPart(attempt.stored, paths))
    return part


def publish(
    storage: Storage,
    attempt: Attempt,
    parts: Sequence[StoredObject],
    tensors: Mapping[str, StoredTensor],
    chunk_parts: Mapping[str, Sequence[int]],
    documents: Mapping[str, Json],
) -> None:
    """Write the root metadata and the documents, then the manifest, which commits the checkpoint.

    Args:
        storage: the job's storage.
        attempt: the attempt that wrote the parts.
        parts: the entries of all writers' listings.
        tensors: all tensors of the plan.
        chunk_parts: for each tensor, the number of the listing that has each of its chunks, in C
            order.
        documents: the parts of the state that are not tensors.

    Raises:
        CheckpointExists: this step of this generation is committed, with other content.
        CheckpointError: a write failed, the attempt was closed because it took too long, or the
            storage lacks what another writer has written, elsewhere.
    """
    commit(
        storage,
        attempt,
        parts,
        contents(attempt.stored, parts, tensors, chunk_parts, encode_strict(dict(documents))),
        required_features(tensors),
    )


def contents(
    stored: StoredStep,
    parts: Sequence[StoredObject],
    tensors: Mapping[str, StoredTensor],
    chunk_parts: Mapping[str, Sequence[int]],
    documents: bytes,
) -> dict[str, bytes]:
    """Return the objects that the manifest lists in addition to the parts, by name.

    Args:
        stored: the checkpoint.
        parts: as for `publish`.
        tensors: as for `publish`.
        chunk_parts: as for `publish`.
        documents: the documents, encoded.
    """
    chunks = encode_chunk_parts(chunk_parts)
    entry = StoredObject(CHUNKS, len(chunks), crc32c.crc32c(chunks))
    root = root_metadata(stored, [*parts, entry], tensors)
    objects = {ROOT: root, CHUNKS: chunks, DOCUMENTS: documents}
    # Readers that do not know the packed codec cannot use the root's metadata, and some open groups
    # only. Other groups may be as many as parameters.
    if any(key.startswith(f"{MODEL}/") and not tensors[key].is_packed for key in tensors):
        objects[f"{MODEL}/{ROOT}"] = encode(group_metadata(MODEL))
    return objects


def commit(
    storage: Storage,
    attempt: Attempt,
    parts: Sequence[StoredObject],
    contents: Mapping[str, bytes],
    required: Sequence[str],
) -> None:
    """Write the manifest's objects other than the parts, then the manifest.

    Args:
        storage: the job's storage.
        attempt: the attempt that wrote the parts.
        parts: the entries of all writers' listings.
        contents: the other objects, by name.
        required: the features that a reader must know.

    Raises:
        CheckpointExists: this step of this generation is committed, with other content.
        CheckpointError: as for `publish`.
    """
    names = list(contents)
    _map_parallel(
        lambda name: storage.write(f"{attempt.directory}/{name}", [contents[name]]), names
    )
    storage.flush([f"{attempt.directory}/{name}" for name in names])
    manifest = manifest_of(attempt, parts, contents, required)
    path = f"{attempt.stored.directory}/{MANIFEST}"
    if is_closed(storage, attempt):
        raise _given_up(storage, attempt)
    _check_written(storage, attempt, parts)
    storage.create(path, manifest.encode())
    # Garbage collection closes an attempt before it looks for its manifest once more: if it missed
    # this manifest, this finds what it has closed. If this cannot be read, the manifest stays:
    # others may rest on it already.
    if is_closed(storage, attempt):
        storage.delete(path)
        raise _given_up(storage, attempt)
    # It only saves readers a listing: without it, or if it names an older checkpoint, they look
    # further.
    with suppress(CheckpointError):
        storage.write(NEWEST, [encode({"directory": attempt.stored.directory})])


def manifest_of(
    attempt: Attempt,
    parts: Sequence[StoredObject],
    contents: Mapping[str, bytes],
    required: Sequence[str],
) -> Manifest:
    """Return the manifest of an attempt's parts and of the other objects that it lists."""
    others = (StoredObject(name, len(data), crc32c.crc32c(data)) for name, data in contents.items())
    stored = attempt.stored
    return Manifest(
        stored.step, stored.generation, attempt.name, (*parts, *others), tuple(required)
    )


def _newest_objects(storage: Storage, name: int, known: Collection[StoredStep]) -> Paths:
    """Return the objects that the writer of this name wrote of the newest checkpoint.

    There are none if none could be linked, or if the newest checkpoint is a known one.
    """
    if not storage.can_link:
        return {}
    # Found without a look at all checkpoints: every writer of every checkpoint comes here.
    previous = newest(storage)
    if previous is None or previous in known:
        return {}
    where = f"{storage.url}/{previous.directory}"
    try:
        manifest = storage.read(f"{previous.directory}/{MANIFEST}")
        directory = Manifest.decode(manifest, f"{where}/{MANIFEST}").directory
        listing = decode_part(storage.read(f"{directory}/{part_name(name)}"), f"{where}/")
    except CheckpointError:
        # The checkpoint was removed meanwhile, had fewer writers, or is damaged: write everything.
        return {}
    return {item: f"{directory}/{item.name}" for item in listing}


def is_closed(storage: Storage, attempt: Attempt) -> bool:
    """Return whether an attempt was given up, so that it can never be committed."""
    try:
        note = Note.decode(storage.read(f"{attempt.directory}/{REMOVED}"))
    except CheckpointMissing:
        return False
    return note is not None and note.is_closed


def _given_up(storage: Storage, attempt: Attempt) -> CheckpointError:
    return CheckpointError(
        f"{storage.url}: step {attempt.stored.step} was not stored: nothing was written to "
        f"{attempt.directory} for so long that garbage collection gave it up; save again, and "
        "give `keepstep ckpt gc` a longer --grace"
    )


def _check_written(storage: Storage, attempt: Attempt, parts: Sequence[StoredObject]) -> None:
    """Check that all parts are where the manifest is going to name them.

    A writer that was given another storage, such as a disk of its own, has written its part there.
    That an object of this name is there is enough: no other attempt has it, and objects are visible
    only when they are complete.
    """
    names = {part.name: f"{attempt.directory}/{part.name}" for part in parts}
    listed = set(storage.names(f"{attempt.directory}/{PARTS}/"))
    unlisted = [part for part, name in names.items() if name not in listed]
    # A listing may be older than the object: what it lacks is looked for.
    found = _map_parallel(lambda part: storage.exists(names[part]), unlisted)
    lacking = [part for part, is_there in zip(unlisted, found, strict=True) if not is_there]
    if not lacking:
        return
    _check_not_committed(storage, attempt.stored)
    raise CheckpointError(
        f"{storage.url}: step {attempt.stored.step} was not stored: {len(lacking)} of "
        f"{len(names)} writers have written elsewhere, {lacking[0]} is not in {attempt.directory}; "
        "save all ranks' parts to one storage that every node reaches, such as a shared file "
        "system or an object store, under the same URL"
    )


def _check_not_committed(storage: Storage, step: StoredStep) -> None:
    if storage.exists(f"{step.directory}/{MANIFEST}"):
        raise CheckpointExists(
            f"{storage.url}: step {step.step} of generation {step.generation} is committed already "
            "and is never overwritten; save under another step, generation or URL"
        )


def _map_parallel(
    act: Callable[[_Item], _Result], items: Sequence[_Item], threads: int | None = None
) -> list[_Result]:
    """Apply a function to all items on several threads; after a failure no further item starts."""
    if len(items) < 2:
        return [act(item) for item in items]
    with ThreadPoolExecutor(min(threads or PARALLEL_WRITES, len(items))) as pool:
        futures = [pool.submit(act, item) for item in items]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in done:
            future.result()
        return [future.result() for future in futures]


@dataclass(frozen=True, slots=True)
class PackJob:
    """Chunks whose cells go into one pack."""

    name: str
    chunks: tuple[Chunk, ...]


_Job = Chunk | PackJob
_Encode = Callable[[Chunk, Bytes], EncodedCells]
"""Encodes the cells of a chunk into memory of `encoded_nbytes`."""


def write_jobs(plan: ChunkPlan, writers: Sequence[int], name: int) -> Iterator[Chunk | PackJob]:
    """Yield the objects that these writers write as the part of this number."""
    batch: list[Chunk] = []
    nbytes, number = 0, 0
    for chunk in (chunk for writer in writers for chunk in plan.chunks[writer]):
        tensor = plan.tensors[chunk.key]
        if not tensor.is_packed:
            yield chunk
            continue
        batch.append(chunk)
        nbytes += chunk.box.size * numpy_dtype(tensor.dtype).itemsize
        if nbytes >= PACK_NBYTES:
            yield PackJob(pack_name(name, number), tuple(batch))
            batch, nbytes, number = [], 0, number + 1
    if batch:
        yield PackJob(pack_name(name, number), tuple(batch))


def _chunk_object(
    plan: ChunkPlan, chunk: Chunk, cells: EncodedCells
) -> tuple[ChunkObject, list[Piece]]:
    tensor = plan.tensors[chunk.key]
    present = [cell.number for cell in cells_over(tensor, chunk, chunk.box)]
    pieces: list[Piece] = [cells.data, shard_index(tensor, present, cells.sizes)]
    name = chunk_name(chunk.key, chunk.place)
    sizes = encode_numbers(cells.sizes) if tensor.compression is not None else b""
    return ChunkObject(name, _nbytes(pieces), encode_numbers(cells.checksums), sizes), pieces


def _pack(job: PackJob, sizes: Sequence[int], memory: Bytes, encoded: _Encode) -> Pack:
    """Encode chunks one after the other into memory that a file system can write without a copy."""
    packed: list[PackedChunk] = []
    end = 0
    for chunk, nbytes in zip(job.chunks, sizes, strict=True):
        cells = encoded(chunk, memory[end : end + nbytes])
        end += nbytes
        packed.append(PackedChunk(chunk.key, chunk.place, encode_numbers(cells.checksums)))
    return Pack(job.name, memory.nbytes, tuple(packed))


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)
