"""Writing a checkpoint: each writer its own chunks, then one of them the manifest, which makes it a checkpoint.

No collective and no gathering in here. Nothing is rewritten or renamed: a crash at any instant leaves objects without a manifest, which nobody
takes for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import crc32c
import numpy as np
import numpy.typing as npt

from checkpoint.chunking import Chunk, ChunkPlan, StoredTensor
from checkpoint.dtypes import numpy_dtype
from checkpoint.errors import CheckpointError
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

_PARALLEL_WRITES = 4

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
    """Write the chunks of these writers and a listing of them; return the listing's own entry.

    Args:
        storage: the job's storage.
        step: which checkpoint.
        plan: who writes what.
        writers: positions in the plan whose chunks are written here.
        read_box: gives the bytes.
        name: number of the listing, unique among those who write this checkpoint.
        stop: asked before every chunk; True ends the attempt.

    Raises:
        CheckpointError: a write failed, or the attempt was stopped.
    """
    chunks = [chunk for writer in writers for chunk in plan.chunks[writer]]

    def one(chunk: Chunk) -> StoredObject:
        if stop():
            raise CheckpointError(f"step {step.step}: the attempt to store it was given up, its generation is over")
        data, crc = _encode(plan.tensors[chunk.key], chunk, read_box)
        stored = StoredObject(chunk_name(chunk.key, chunk.place), len(data), crc)
        storage.write(f"{step.directory}/{stored.name}", data)
        return stored

    with ThreadPoolExecutor(_PARALLEL_WRITES) as pool:
        futures = [pool.submit(one, chunk) for chunk in chunks]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in done:
            future.result()
    listing = encode([future.result().to_json() for future in futures])
    part = StoredObject(part_name(name), len(listing), crc32c.crc32c(listing))
    storage.write(f"{step.directory}/{part.name}", listing)
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
        CheckpointExists: this step of this generation was committed before.
        CheckpointError: a write failed.
    """
    with ThreadPoolExecutor(_PARALLEL_WRITES) as pool:
        # For readers that do not know consolidated metadata; ours needs only the root.
        list(
            pool.map(
                lambda item: storage.write(
                    f"{step.directory}/{item[0]}/{ROOT}", encode(array_metadata(item[1]))
                ),
                tensors.items(),
            )
        )
    objects = list(parts)
    for name, content in (
        (ROOT, root_metadata(step.step, step.generation, tensors)),
        (DOCUMENTS, dict(documents)),
    ):
        data = encode(content)
        storage.write(f"{step.directory}/{name}", data)
        objects.append(StoredObject(name, len(data), crc32c.crc32c(data)))
    manifest = Manifest(step.step, step.generation, tuple(objects))
    storage.create(f"{step.directory}/{MANIFEST}", manifest.encode())


def _encode(tensor: StoredTensor, chunk: Chunk, read_box: ReadBox) -> tuple[bytes, int]:
    """Return a chunk as Zarr's codecs `bytes` and `crc32c` make it, and its checksum. Edge chunks are padded with zeros."""
    itemsize = numpy_dtype(tensor.dtype).itemsize
    values = read_box(chunk.key, chunk.box)
    if chunk.box.shape != tensor.chunk:
        padded = np.zeros((*tensor.chunk, itemsize), np.uint8)
        padded[tuple(slice(0, n) for n in chunk.box.shape)] = values
        values = padded
    flat = np.ascontiguousarray(values).reshape(-1)
    crc = crc32c.crc32c(flat.data)
    return flat.tobytes() + crc.to_bytes(4, "little"), crc
