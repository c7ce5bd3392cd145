"""Compares checkpoints of any two formats, tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.convert.write.renaming import aliases_of
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from keepstep.checkpoint.format.stored.housekeeping import (
    VALUES_DIFFER,
    Difference,
    compare,
    differing_documents,
)
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint

_BLOCK_NBYTES = 16 * 2**20


def compare_any(first: Source, second: Source) -> Difference:
    """Compare two checkpoints; values bit by bit.

    A tied tensor that one of them has in full, and the other under its first name alone, is
    compared like any other.

    Raises:
        CheckpointError: a tensor cannot be read, or is damaged.
    """
    if isinstance(first, StoredCheckpoint) and isinstance(second, StoredCheckpoint):
        found = compare(first, second)
        changed = {
            key: _how_much(first, key, second, key) if change == VALUES_DIFFER else change
            for key, change in found.changed.items()
        }
        return replace(found, changed=changed)
    before, after = _keys_of(first), _keys_of(second)
    changed = {}
    for key in sorted(before.keys() & after.keys()):
        old, new = first.tensors[before[key]], second.tensors[after[key]]
        if old != new:
            changed[key] = f"{old.dtype} {list(old.shape)} -> {new.dtype} {list(new.shape)}"
        elif not _is_equal(first, before[key], second, after[key]):
            changed[key] = _how_much(first, before[key], second, after[key])
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


def _how_much(first: Source, key: str, second: Source, other: str) -> str:
    """Return how many elements of a tensor differ, and by how much at most."""
    spec = first.tensors[key]
    dtype = numpy_dtype(spec.dtype)
    count, most, has_nan = 0, 0.0, False
    wide = np.complex128 if dtype.kind == "c" else np.float64
    for box in boxes_in_order(spec, _BLOCK_NBYTES):
        old, new = (
            np.frombuffer(_bytes(source, name, box), dtype)
            for source, name in ((first, key), (second, other))
        )
        bits = [values.view(np.uint8).reshape(values.size, dtype.itemsize) for values in (old, new)]
        differs = (bits[0] != bits[1]).any(axis=1)
        count += int(differs.sum())
        with np.errstate(invalid="ignore", over="ignore"):
            distances = np.abs(new[differs].astype(wide) - old[differs].astype(wide))
        has_nan = has_nan or bool(np.isnan(distances).any())
        most = max(most, float(np.nanmax(distances, initial=0.0)))
    nan = ", some are or were NaN" if has_nan else ""
    return f"{VALUES_DIFFER}: {count:,} of {math.prod(spec.shape):,}, by up to {most:.3g}{nan}"


def _bytes(source: Source, key: str, box: Box) -> bytes:
    into = bytearray(box.size * numpy_dtype(source.tensors[key].dtype).itemsize)
    source.read([BoxRequest(key, box, memoryview(into))])
    return bytes(into)
