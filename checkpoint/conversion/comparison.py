"""Compares checkpoints of any two formats, tensor by tensor."""

from __future__ import annotations

from keepstep.checkpoint.conversion.boxes_in_order import boxes_in_order
from keepstep.checkpoint.conversion.respelling import aliases_of
from keepstep.checkpoint.layout.boxes import Box
from keepstep.checkpoint.layout.dtypes import numpy_dtype
from keepstep.checkpoint.layout.source import BoxRequest, Source
from keepstep.checkpoint.stored.housekeeping import Difference, compare, differing_documents
from keepstep.checkpoint.stored.reader import StoredCheckpoint

_BLOCK_NBYTES = 16 * 2**20


def compare_any(first: Source, second: Source) -> Difference:
    """Compare two checkpoints; values bit by bit.

    A tied tensor that one of them has in full, and the other under its first name alone, is
    compared like any other.

    Raises:
        CheckpointError: a tensor cannot be read, or is damaged.
    """
    if isinstance(first, StoredCheckpoint) and isinstance(second, StoredCheckpoint):
        return compare(first, second)
    before, after = _keys_of(first), _keys_of(second)
    changed: dict[str, str] = {}
    for key in sorted(before.keys() & after.keys()):
        old, new = first.tensors[before[key]], second.tensors[after[key]]
        if old != new:
            changed[key] = f"{old.dtype} {list(old.shape)} -> {new.dtype} {list(new.shape)}"
        elif not _is_equal(first, before[key], second, after[key]):
            changed[key] = "values"
    return Difference(
        only_first=tuple(sorted(before.keys() - after.keys())),
        only_second=tuple(sorted(after.keys() - before.keys())),
        changed=changed,
        documents=differing_documents(first.documents, second.documents),
    )


def _keys_of(source: Source) -> dict[str, str]:
    """Return the keys under which tensors are known, and those that store them."""
    return {**{key: key for key in source.tensors}, **aliases_of(source)}


def _is_equal(first: Source, key: str, second: Source, other: str) -> bool:
    return all(
        _bytes(first, key, box) == _bytes(second, other, box)
        for box in boxes_in_order(first.tensors[key], _BLOCK_NBYTES)
    )


def _bytes(source: Source, key: str, box: Box) -> bytes:
    into = bytearray(box.size * numpy_dtype(source.tensors[key].dtype).itemsize)
    source.read([BoxRequest(key, box, memoryview(into))])
    return bytes(into)
