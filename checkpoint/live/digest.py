"""Computes digests of this rank's training state, to compare replicas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import crc32c

from keepstep.checkpoint.live.tensors import LiveTensor, as_bytes, plain


def layout_digest(tensors: Iterable[LiveTensor]) -> str:
    """Return a name for this set of boxes of tensors: equal on replicas only."""
    boxes = sorted(
        [tensor.key, tensor.dtype, tensor.global_shape, tensor.box.offset, tensor.box.shape]
        for tensor in tensors
    )
    return hashlib.sha256(json.dumps(boxes).encode()).hexdigest()[:16]


def checksums(tensors: Sequence[LiveTensor]) -> Mapping[str, int]:
    """Return the CRC-32C of each tensor's local elements; those of a GPU are copied to the host."""
    sums: dict[str, int] = {}
    for tensor in tensors:
        # A rank may hold several boxes of a tensor; their bytes count one after the other.
        sums[tensor.key] = int(crc32c.crc32c(as_bytes(plain(tensor.data)), sums.get(tensor.key, 0)))
    return sums


def content_digest(checksums: Mapping[str, int]) -> str:
    """Return one digest of all tensors' checksums."""
    listed = json.dumps(sorted(checksums.items()))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]
