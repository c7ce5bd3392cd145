"""Copies large tensors of the host by stores that bypass the processor's caches.

A usual store reads the cache line that it overwrites, so a third of the traffic is in vain, and it
evicts the data of training. ISA-L's multiplication of a vector by a constant of GF(2^8) stores
around the caches; by one, it is a copy. With PyTorch's copy instead, 200 to 800 MB take 1.4 times
the processor, and a save in the background stalls training 1.4 to 1.7 times as long.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Sequence
from functools import cache

import torch

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.live.tensors import bytes_of, is_plain
from keepstep.checkpoint.snapshot.isal import isal
from keepstep.torch_internals import copy_all

_LEAST_NBYTES = 2**20
"""Smaller ones are copied together: each call of its own needs the GIL again."""

_MOST_NBYTES = 2**30
"""Bytes that one call copies; the kernel takes the length as an int."""

_ALIGNMENT = 32
"""Bytes: of both addresses, and of the length. The kernel's stores fault elsewhere."""

_EXPECTED_BYTES_PER_S = 1e9
_PATIENCE_S = 0.005

_Pair = tuple[torch.Tensor, torch.Tensor]


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, of the same shape and dtype, all in the host's memory.

    Large ones are copied one by one. Another thread that computes in Python may hold the GIL for
    milliseconds after each: then the others are copied in one call.
    """
    rest: list[_Pair] = []
    expected_s, began_s = _PATIENCE_S, time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        if not _can_stream(target, source) or time.perf_counter() - began_s > expected_s:
            rest.append((target, source))
            continue
        nbytes = _stream(target, source)
        expected_s += nbytes / _EXPECTED_BYTES_PER_S
        if nbytes < source.nbytes:
            rest.append((bytes_of(target)[nbytes:], bytes_of(source)[nbytes:]))
    if rest:
        copy_all([target for target, _ in rest], [source for _, source in rest])


def _can_stream(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        source.nbytes >= _LEAST_NBYTES
        # Subclasses may have no memory of their own.
        and type(source) is torch.Tensor
        and source.data_ptr() != 0
        and (source.data_ptr() | target.data_ptr()) % _ALIGNMENT == 0
        and is_plain(source)
        and is_plain(target)
        and _tables() is not None
    )


def _stream(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy all but a remainder at the end; return the number of copied bytes."""
    nbytes = source.nbytes - source.nbytes % _ALIGNMENT
    for offset in range(0, nbytes, _MOST_NBYTES):
        # Other threads may see these stores late. The lock of the GIL, which this thread takes
        # next, orders them before its next message.
        failed = isal().gf_vect_mul(
            min(_MOST_NBYTES, nbytes - offset),
            _tables(),
            source.data_ptr() + offset,
            target.data_ptr() + offset,
        )
        assert not failed, "the length is a multiple of the alignment"
    return nbytes


@cache
def _tables() -> ctypes.Array[ctypes.c_ubyte] | None:
    """Return the kernel's tables for the constant one; None if there is no such kernel here."""
    if platform.machine() != "x86_64":
        return None
    try:
        library = isal()
    except CheckpointError:
        return None
    tables = (ctypes.c_ubyte * 32)()
    library.gf_vect_mul_init(1, tables)
    return tables
