"""Writing a checkpoint: each writer its chunks, then one of them the manifest, which makes it one.

No collective and no gathering in here, and no torch: snapshot servers write too. Nothing is rewritten or
renamed: a crash at any instant leaves objects without a manifest, which nobody takes for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import crc32c
import numpy as np
import numpy.typing as npt

from checkpoint.chunking import PACK_NBYTES, Cell, Chunk, ChunkPlan, StoredTensor, cells_over
from checkpoint.dtypes import numpy_dtype
from checkpoint.errors import CheckpointError, CheckpointExists
from checkpoint.format import (
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
    encode,
    encode_part,
    pack_name,
    part_name,
    root_metadata,
    shard_index,
)
from checkpoint.layout import Box, Json
from checkpoint.storage import Storage

# A pack, or a chunk that must be put together or padded, is held in memory once per writing thread.
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
    _refuse_committed(storage, step)
    # A directory that was removed, or left by a writer that died, may have been noted for deletion: it is in use again.
    storage.delete(f"{step.directory}/{REMOVED}")

    def write(job: _Job) -> DataObject:
        made, pieces = _chunk_object(plan, job, cells) if isinstance(job, Chunk) else _pack(plan, job, cells)
        storage.write(f"{step.directory}/{made.name}", pieces)
        return made

    def cells(chunk: Chunk) -> Iterator[tuple[Cell, memoryview]]:
        if stop():
            raise CheckpointError(
                f"step {step.step}: the attempt to store it was given up, its generation {step.generation} is over"
            )
        return _cells(plan.tensors[chunk.key], chunk, read_box)

    jobs = [job for writer in writers for job in _jobs(plan, writer)]
    arrays = [job.key for job in jobs if isinstance(job, Chunk) and not any(job.place)]
    written = _all(write, jobs)
    listing = encode_part(written)
    part = StoredObject(part_name(name), len(listing), crc32c.crc32c(listing))
    documents = {f"{key}/{ROOT}": encode(array_metadata(key, plan.tensors[key])) for key in arrays}
    documents[part.name] = listing
    _all(lambda item: storage.write(f"{step.directory}/{item[0]}", [item[1]]), list(documents.items()))
    storage.settle([f"{step.directory}/{stored}" for stored in (*(made.name for made in written), *documents)])
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

    written = _all(one, list(contents))
    storage.settle([f"{step.directory}/{stored.name}" for stored in written])
    manifest = Manifest(step.step, step.generation, (*parts, *written))
    storage.create(f"{step.directory}/{MANIFEST}", manifest.encode())


def _refuse_committed(storage: Storage, step: StoredStep) -> None:
    if storage.exists(f"{step.directory}/{MANIFEST}"):
        raise CheckpointExists(
            f"{storage.url}: step {step.step} of generation {step.generation} is committed already "
            "and is never overwritten; save under another step, generation or URL"
        )


def _all(act: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
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
_Cells = Callable[[Chunk], Iterator[tuple[Cell, memoryview]]]


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


def _chunk_object(plan: ChunkPlan, chunk: Chunk, cells: _Cells) -> tuple[ChunkObject, list[Piece]]:
    tensor = plan.tensors[chunk.key]
    checksums: list[int | None] = [None] * cells_per_chunk(tensor)
    pieces: list[Piece] = []
    for cell, payload in cells(chunk):
        crc = crc32c.crc32c(payload)
        checksums[cell.number] = crc
        pieces += [payload, crc.to_bytes(4, "little")]
    pieces.append(shard_index(tensor, checksums))
    return ChunkObject(chunk_name(chunk.key, chunk.place), _nbytes(pieces), tuple(checksums)), pieces


def _pack(plan: ChunkPlan, job: _PackJob, cells: _Cells) -> tuple[Pack, list[Piece]]:
    packed: list[PackedCell] = []
    pieces: list[Piece] = []
    for chunk in job.chunks:
        for cell, payload in cells(chunk):
            crc = crc32c.crc32c(payload)
            packed.append(PackedCell(chunk.key, cell.place, crc))
            pieces += [payload, crc.to_bytes(4, "little")]
    return Pack(job.name, _nbytes(pieces), tuple(packed)), pieces


def _cells(tensor: StoredTensor, chunk: Chunk, read_box: ReadBox) -> Iterator[tuple[Cell, memoryview]]:
    """Yield a chunk's cells with their bytes as Zarr's codec `bytes` has them, padded with zeros at the tensor's edge."""
    values = read_box(chunk.key, chunk.box)
    for cell in cells_over(tensor, chunk, chunk.box):
        payload = values if cell.box == chunk.box else values[cell.box.within(chunk.box).slices]
        if cell.box.shape != tensor.cell:
            padded = np.zeros((*tensor.cell, payload.shape[-1]), np.uint8)
            padded[tuple(slice(0, n) for n in cell.box.shape)] = payload
            payload = padded
        yield cell, np.ascontiguousarray(payload).reshape(-1).data


def _nbytes(pieces: Sequence[Piece]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)
