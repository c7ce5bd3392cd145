"""Places tensors one after the other in a mapped buffer, and makes tensors over their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepstep.checkpoint.format.layout.boxes import Entry
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.snapshot.arena import Arena

ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple of it."""

Signature = Sequence[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor's data."""


def pack(tensors: Sequence[LiveTensor]) -> tuple[tuple[Entry, ...], int]:
    """Return the place of each tensor, and the size of all in bytes, with padding."""
    entries, offset = [], 0
    for tensor in tensors:
        entries.append(tensor.entry(offset))
        offset += round_up(entries[-1].nbytes, ALIGNMENT)
    return tuple(entries), offset


def signature_of(tensors: Sequence[LiveTensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Return shape and dtype of each tensor's data."""
    return tuple((tensor.data.shape, tensor.data.dtype) for tensor in tensors)


def views_over(arena: Arena, entries: Sequence[Entry], signature: Signature) -> list[torch.Tensor]:
    """Return tensors over the buffer, one per entry; they keep the buffer mapped."""
    memory = torch.from_numpy(arena.bytes)
    views = []
    for entry, (shape, dtype) in zip(entries, signature, strict=True):
        flat = memory[entry.byte_offset : entry.byte_offset + entry.nbytes]
        views.append(flat.view(dtype).reshape(shape))
    return views
