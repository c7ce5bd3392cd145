"""Writing a checkpoint: each writer its chunks, then one of them the manifest, which makes it one.

No collective and no gathering in here, and no torch: snapshot servers write too. Nothing is rewritten or
renamed: a crash at any instant leaves objects without a manifest, which nobody takes for a checkpoint.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import crc32c
import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import CheckpointError, CheckpointExists
from keepstep.checkpoint.layout.boxes import Box, Json
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.stored.chunking import (
    PACK_NBYTES,
    Chunk,
    ChunkPlan,
    StoredTensor,
    cells_over,
)
from keepstep.checkpoint.stored.format import (
    DOCUMENTS,
    MANIFEST,
    REMOVED,
    ROOT,
    ChunkObject,
    DataObject,
    Manifest,
    Pack,
    PackedCell,
    StoredObject,
    StoredStep,
    array_metadata,
    cells_per_chunk,
    chunk_name,
    decode_part,
    encode,
    encode_part,
    pack_name,
    part_name,
    root_metadata,
    shard_index,
)
from keepstep.checkpoint.stored.storage import Storage

# A pack or a chunk, as it will be stored, is held in memory once per writing thread.
_PARALLEL_WRITES = 4

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

ReadBox = Callable[[str, Box], npt.NDArray[np.uint8]]
"""Returns a box's bytes: the box's shape plus a last axis of one element's bytes."""

Piece = bytes | memoryview


def write_part(
    storage: Storage,
    step: StoredStep,
    plan: ChunkPlan,
    writers: Sequence[int],
    read_box: ReadBox,
    *,
    name: int,
    stop: Callable[[], bool] = lambda: False,
) -> StoredObject:
    """Write the chunks of these writers and a listing of them, durably; return the listing's own entry.

    What is as it was in the newest checkpoint, such as frozen weights, is not written again if the storage can do without.

    Whoever writes an array's first chunk writes its metadata too: there may be thousands, and publishing waits for nothing else.

    Args:
        storage: the job's storage.
        step: which checkpoint.
        plan: who writes what.
        writers: positions in the plan whose chunks are written here.
        read_box: gives the bytes; called from several threads.
        name: number of the listing, unique among those who write this checkpoint.
        stop: asked before every chunk; True ends the attempt.

    Raises:
        CheckpointExists: this step of this generation is committed; its chunks are not touched.
        CheckpointError: a write failed, or the attempt was stopped.
    """
    _check_not_committed(storage, step)
    # A directory that was removed, or left by a writer that died, may have been noted for deletion: it is in use again.
    storage.delete(f"{step.directory}/{REMOVED}")

    last = _previous_objects(storage, step, name)

    def write(job: _Job) -> DataObject:
        made, pieces = (
            _chunk_object(plan, job, encoded)
            if isinstance(job, Chunk)
            else _pack(plan, job, encoded)
        )
        # Equal checksums only make it likely that the bytes are equal; the storage compares them.
        before = last.get(made)
        if before is None or not storage.link_identical(
            before, f"{step.directory}/{made.name}", pieces
        ):
            storage.write(f"{step.directory}/{made.name}", pieces)
        return made

    def encoded(chunk: Chunk) -> tuple[memoryview, tuple[int, ...]]:
        if stop():
            raise CheckpointError(
                f"step {step.step}: the attempt to store it was given up, its generation {step.generation} is over"
            )
        data, checksums = encode_cells(plan.tensors[chunk.key], read_box(chunk.key, chunk.box))
        return data.data, checksums

    jobs = [job for writer in writers for job in _jobs(plan, writer)]
    arrays = [job.key for job in jobs if isinstance(job, Chunk) and not any(job.place)]
    written = _map_parallel(write, jobs)
    listing = encode_part(written)
    part = StoredObject(part_name(name), len(listing), crc32c.crc32c(listing))
    documents = {f"{key}/{ROOT}": encode(array_metadata(key, plan.tensors[key])) for key in arrays}
    documents[part.name] = listing
    _map_parallel(
        lambda item: storage.write(f"{step.directory}/{item[0]}", [item[1]]),
        list(documents.items()),
    )
    storage.flush(
        [f"{step.directory}/{stored}" for stored in (*(made.name for made in written), *documents)]
    )
    return part


def publish(
    storage: Storage,
    step: StoredStep,
    parts: Sequence[StoredObject],
    tensors: Mapping[str, StoredTensor],
    documents: Mapping[str, Json],
) -> None:
    """Write the root's metadata and the documents, then the manifest, upon which the step is a checkpoint.

    Args:
        storage: the job's storage.
        step: which checkpoint.
        parts: the entries of all writers' listings.
        tensors: all tensors of the plan.
        documents: everything that is no tensor.

    Raises:
        CheckpointExists: this step of this generation was committed before, with other content.
        CheckpointError: a write failed.
    """
    contents: dict[str, Json] = {
        ROOT: root_metadata(step.step, step.generation, tensors),
        DOCUMENTS: dict(documents),
    }

    def one(name: str) -> StoredObject:
        data = encode(contents[name])
        storage.write(f"{step.directory}/{name}", [data])
        return StoredObject(name, len(data), crc32c.crc32c(data))

    written = _map_parallel(one, list(contents))
    storage.flush([f"{step.directory}/{stored.name}" for stored in written])
    manifest = Manifest(step.step, step.generation, (*parts, *written))
    storage.create(f"{step.directory}/{MANIFEST}", manifest.encode())


def _previous_objects(storage: Storage, step: StoredStep, name: int) -> Mapping[DataObject, str]:
    """Return what the writer of this name wrote of the newest other checkpoint, and where; nothing if that is of no use."""
    if not storage.supports_links:
        return {}
    found = [
        stored
        for stored in map(StoredStep.parse, storage.directories_with(MANIFEST))
        if stored and stored != step
    ]
    if not found:
        return {}
    directory = max(found, key=lambda stored: (stored.step, stored.generation)).directory
    try:
        listing = decode_part(
            storage.read(f"{directory}/{part_name(name)}"), f"{storage.url}/{directory}/"
        )
    except CheckpointError:
        # It was removed meanwhile, had fewer writers, or is damaged: all is written.
        return {}
    return {item: f"{directory}/{item.name}" for item in listing}


def _check_not_committed(storage: Storage, step: StoredStep) -> None:
    if storage.exists(f"{step.directory}/{MANIFEST}"):
        raise CheckpointExists(
            f"{storage.url}: step {step.step} of generation {step.generation} is committed already "
            "and is never overwritten; save under another step, generation or URL"
        )


def _map_parallel(act: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Do it for all items on several threads; after a first failure none is begun any more."""
    with ThreadPoolExecutor(_PARALLEL_WRITES) as pool:
        futures = [pool.submit(act, item) for item in items]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in done:
            future.result()
        return [future.result() for future in futures]


@dataclass(frozen=True, slots=True)
class _PackJob:
    """Chunks whose cells go into one pack."""

    name: str
    chunks: tuple[Chunk, ...]


_Job = Chunk | _PackJob
_Encode = Callable[[Chunk], tuple[memoryview, tuple[int, ...]]]


def _jobs(plan: ChunkPlan, writer: int) -> Iterator[_Job]:
    """Yield the objects that a writer writes."""
    batch: list[Chunk] = []
    nbytes, number = 0, 0
    for chunk in plan.chunks[writer]:
        tensor = plan.tensors[chunk.key]
        if not tensor.is_packed:
            yield chunk
            continue
        batch.append(chunk)
        nbytes += chunk.box.size * numpy_dtype(tensor.dtype).itemsize
        if nbytes >= PACK_NBYTES:
            yield _PackJob(pack_name(writer, number), tuple(batch))
            batch, nbytes, number = [], 0, number + 1
    if batch:
        yield _PackJob(pack_name(writer, number), tuple(batch))


def _chunk_object(
    plan: ChunkPlan, chunk: Chunk, encoded: _Encode
) -> tuple[ChunkObject, list[Piece]]:
    tensor = plan.tensors[chunk.key]
    checksums: list[int | None] = [None] * cells_per_chunk(tensor)
    data, found = encoded(chunk)
    for cell, crc in zip(cells_over(tensor, chunk, chunk.box), found, strict=True):
        checksums[cell.number] = crc
    pieces: list[Piece] = [data, shard_index(tensor, checksums)]
    return ChunkObject(
        chunk_name(chunk.key, chunk.place), _nbytes(pieces), tuple(checksums)
    ), pieces


def _pack(plan: ChunkPlan, job: _PackJob, encoded: _Encode) -> tuple[Pack, list[Piece]]:
    packed: list[PackedCell] = []
    pieces: list[Piece] = []
    for chunk in job.chunks:
        data, found = encoded(chunk)
        pieces.append(data)
        cells = cells_over(plan.tensors[chunk.key], chunk, chunk.box)
        packed += [
            PackedCell(chunk.key, cell.place, crc) for cell, crc in zip(cells, found, strict=True)
        ]
    return Pack(job.name, _nbytes(pieces), tuple(packed)), pieces


def encode_cells(
    tensor: StoredTensor, values: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
    """Return a chunk's cells as Zarr's codecs `bytes` and `crc32c` have them, in C order, and their checksums.

    Args:
        tensor: whose chunk it is.
        values: the chunk's bytes, without what of it lies beyond the tensor's edge; the last axis is one element's bytes.
    """
    *shape, itemsize = values.shape
    counts = [-(-extent // cell) for extent, cell in zip(shape, tensor.cell, strict=True)]
    full = [count * cell for count, cell in zip(counts, tensor.cell, strict=True)]
    if shape != full:
        padded = np.zeros((*full, itemsize), np.uint8)
        padded[tuple(slice(0, extent) for extent in shape)] = values
        values = padded
    rank, nbytes = len(shape), tensor.cell_nbytes
    encoded = _aligned_empty(math.prod(counts) * (nbytes + 4)).reshape(-1, nbytes + 4)
    # Both sides with an axis for the cell's place and one for the element's place in it, for each axis of the tensor. All these are
    # views: splitting an axis never needs a copy.
    split = values.reshape(*itertools.chain(*zip(counts, tensor.cell, strict=True)), itemsize)
    in_order = split.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2), 2 * rank)
    encoded[:, :nbytes].reshape(*counts, *tensor.cell, itemsize)[...] = in_order
    checksums = tuple(crc32c.crc32c(cell[:nbytes].data) for cell in encoded)
    encoded[:, nbytes:] = np.array(checksums, "<u4").view(np.uint8).reshape(-1, 4)
    return encoded.reshape(-1), checksums


def _aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins with a page, from which a file system may take it without a copy."""
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    skipped = -memory.ctypes.data % mmap.PAGESIZE
    return memory[skipped : skipped + nbytes]


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)
