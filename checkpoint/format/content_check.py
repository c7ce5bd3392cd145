"""Compares a stored checkpoint's contents with the digest that was taken from the ranks' memory.

Checksums show that stored bytes are those that were written. This shows more: that what was written
is what memory held, and that reading puts it back in the same places.
"""

from __future__ import annotations

from collections.abc import Sequence

import crc32c
import numpy as np

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.content_digest import (
    DIGEST,
    chunk_hash,
    digest_document,
    sum_of,
)
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from keepstep.checkpoint.format.stored.chunking import Chunk, chunks_over
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint

_BATCH_NBYTES = 64 * 2**20


def check_content(source: StoredCheckpoint) -> bool:
    """Read all tensors and compare them with the digest; return False if there is no digest.

    Raises:
        CheckpointDamaged: the contents differ, or cannot be read.
    """
    expected = source.documents.get(DIGEST)
    if expected is None:
        return False
    total, batch, nbytes = 0, list[Chunk](), 0
    for key, tensor in source.stored_tensors.items():
        for chunk in chunks_over(key, tensor.shape, tensor.chunk, Box.whole(tensor.shape)):
            batch.append(chunk)
            nbytes += chunk.box.size * numpy_dtype(tensor.dtype).itemsize
            if nbytes >= _BATCH_NBYTES:
                total = sum_of((total, content_of(source, batch)))
                batch, nbytes = [], 0
    total = sum_of((total, content_of(source, batch)))
    if digest_document(total) != expected:
        raise CheckpointDamaged(
            f"{source.storage.url}/{source.directory}: its tensors are not what was in memory when "
            f"step {source.step} was saved (digest {expected}, read {digest_document(total)}), "
            "although each object is as it was written; load another step, and report this"
        )
    return True


def content_of(source: Source, chunks: Sequence[Chunk]) -> int:
    """Read chunks at once, and return the sum of their hashes."""
    requests = []
    for chunk in chunks:
        itemsize = numpy_dtype(source.tensors[chunk.key].dtype).itemsize
        memory = np.empty(chunk.box.size * itemsize, np.uint8)
        requests.append(BoxRequest(chunk.key, chunk.box, memory.data))
    source.read(requests)
    return sum_of(
        chunk_hash(chunk.key, chunk.place, crc32c.crc32c(request.into))
        for chunk, request in zip(chunks, requests, strict=True)
    )
