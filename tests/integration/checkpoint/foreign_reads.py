"""Reads foreign checkpoints for tests: whole tensors, and boxes that cross their pieces."""

from __future__ import annotations

import torch

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.format.layout.boxes import Box
from tests.unit.checkpoint.convert.read.written import box_of


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in C order, as they are in memory."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(source: ForeignCheckpoint, key: str, expected: torch.Tensor) -> None:
    """Check that a tensor has an expected one's data type, shape and bits, also read by parts."""
    spec = source.tensors[key]
    assert spec.dtype == str(expected.dtype).removeprefix("torch."), key
    assert spec.shape == tuple(expected.shape), key
    assert box_of(source, key, Box.whole(spec.shape)).tobytes() == bytes_of(expected), key
    inner = tuple((extent // 3, extent - extent // 3) for extent in spec.shape)
    if all(start < stop for start, stop in inner):
        box = Box(tuple(a for a, _ in inner), tuple(b - a for a, b in inner))
        part = expected[tuple(slice(a, b) for a, b in inner)]
        assert box_of(source, key, box).tobytes() == bytes_of(part), (key, box)
