"""Writing a checkpoint: each writer its chunks, then one of them the manifest, which makes it one.

No collective and no gathering in here, and no torch: snapshot servers write too. Nothing is rewritten or
renamed: a crash at any instant leaves objects without a manifest, which nobody takes for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import crc32c
import numpy as np
import numpy.typing as npt

from checkpoint.chunking import Chunk, ChunkPlan, StoredTensor
from checkpoint.dtypes import numpy_dtype
from checkpoint.errors import CheckpointError, CheckpointExists
from checkpoint.format import (
    DOCUMENTS,
    MANIFEST,
    ROOT,
    Manifest,
    StoredObject,
    StoredStep,
    array_metadata,
    chunk_name,
    encode,
    part_name,
    root_metadata,
)
from checkpoint.layout import Box, Json
from checkpoint.storage import Storage

# A chunk that must be put together or padded is held in memory once per writing thread.
_PARALLEL_WRITES = 4

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

ReadBox = Callable[[str, Box], npt.NDArray[np.uint8]]
"""Returns a box's bytes: the box's shape plus a last axis of one element's bytes."""


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

    def one(chunk: Chunk) -> StoredObject:
        if stop():
            raise CheckpointError(
                f"step {step.step}: the attempt to store it was given up, its generation {step.generation} is over"
            )
        payload = _payload(plan.tensors[chunk.key], chunk, read_box)
        crc = crc32c.crc32c(payload)
        stored = StoredObject(chunk_name(chunk.key, chunk.place), payload.nbytes + 4, crc)
        storage.write(f"{step.directory}/{stored.name}", [payload, crc.to_bytes(4, "little")])
        return stored

    written = _all(one, [chunk for writer in writers for chunk in plan.chunks[writer]])
    listing = encode([stored.to_json() for stored in written])
    part = StoredObject(part_name(name), len(listing), crc32c.crc32c(listing))
    storage.write(f"{step.directory}/{part.name}", [listing])
    storage.settle([f"{step.directory}/{stored.name}" for stored in (*written, part)])
    return part


def publish(
    storage: Storage,
    step: StoredStep,
    parts: Sequence[StoredObject],
    tensors: Mapping[str, StoredTensor],
    documents: Mapping[str, Json],
) -> None:
    """Write the metadata and then the manifest, upon which the step is a checkpoint.

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
    metadata: dict[str, Json] = {
        f"{key}/{ROOT}": array_metadata(tensor) for key, tensor in tensors.items()
    }  # For readers that do not know consolidated metadata; ours needs only the root.
    metadata[ROOT] = root_metadata(step.step, step.generation, tensors)
    metadata[DOCUMENTS] = dict(documents)

    def one(name: str) -> StoredObject:
        data = encode(metadata[name])
        storage.write(f"{step.directory}/{name}", [data])
        return StoredObject(name, len(data), crc32c.crc32c(data))

    written = _all(one, list(metadata))
    storage.settle([f"{step.directory}/{stored.name}" for stored in written])
    needed = [stored for stored in written if stored.name in (ROOT, DOCUMENTS)]
    manifest = Manifest(step.step, step.generation, (*parts, *needed))
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


def _payload(tensor: StoredTensor, chunk: Chunk, read_box: ReadBox) -> memoryview:
    """Return a chunk's bytes as Zarr's codec `bytes` has them, padded with zeros at the tensor's edge."""
    itemsize = numpy_dtype(tensor.dtype).itemsize
    values = read_box(chunk.key, chunk.box)
    if chunk.box.shape != tensor.chunk:
        padded = np.zeros((*tensor.chunk, itemsize), np.uint8)
        padded[tuple(slice(0, n) for n in chunk.box.shape)] = values
        values = padded
    return np.ascontiguousarray(values).reshape(-1).data
