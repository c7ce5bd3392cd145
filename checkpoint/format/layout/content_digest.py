"""Computes a digest of a checkpoint's contents before they are encoded, for a later comparison.

Pure. The digest is the sum, modulo 2^64, of a hash of each chunk: its tensor, its place and the
CRC-32C of its elements in C order. A sum depends on neither order nor ranks: each rank adds its
chunks, and a few bytes hold the digest of a checkpoint of any size. Unlike the checksums of stored
bytes, it covers the way from memory to storage and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import PROVENANCE

DIGEST = "saved/digest"
"""The document that holds the digest."""

OF_ONE_SAVE = frozenset({DIGEST, PROVENANCE})
"""Documents about how a state was saved: equal states may have others.

The digest depends on the chunks, so on how many ranks saved, and checkpoints of DCP's writer have
none.
"""

_MODULUS = 2**64


def chunk_hash(key: str, place: Sequence[int], crc32c: int) -> int:
    """Return the hash of one chunk.

    Args:
        key: the tensor.
        place: the chunk's place in the tensor's grid.
        crc32c: checksum of the chunk's elements, cut off at the tensor's edge.
    """
    text = f"{key} {','.join(map(str, place))} {crc32c}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def sum_of(hashes: Iterable[int]) -> int:
    """Return the sum of hashes, or of sums."""
    return sum(hashes) % _MODULUS


def digest_document(total: int) -> Json:
    """Return the document of a checkpoint whose chunks' hashes have this sum."""
    return {"chunks": f"{total:016x}"}
