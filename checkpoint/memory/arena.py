"""Memory that snapshots live in: anonymous files (memfd) that one process owns and others map by a descriptor that it hands them.

A memfd has no name in any file system, so nothing is left behind whatever dies, and it does not depend on the size of /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.layout.boxes import Box, Entry

Bytes = npt.NDArray[np.uint8]


class Arena:
    """One mapped buffer. `close` unmaps it; memory goes back to the system when the last process has."""

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, max(nbytes, 1), access=access)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Make a buffer of this size."""
        descriptor = os.memfd_create("keepstep-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
            return cls(descriptor, nbytes, writable=True)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def buffer(self) -> memoryview:
        """The buffer's bytes."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap and close. Views that others still hold keep the mapping until they go."""
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            pass  # A tensor still views it; the mapping goes with that.
        os.close(self.descriptor)


def box_bytes(entry: Entry, memory: Bytes, box: Box) -> Bytes:
    """Return a view of a box (global coordinates, inside the entry's): its shape plus a last axis of one element's bytes."""
    itemsize = entry.nbytes // max(entry.box.size, 1)
    whole = memory[entry.byte_offset : entry.byte_offset + entry.nbytes]
    return whole.reshape(*entry.box.shape, itemsize)[box.within(entry.box).slices]


def contiguous_range(entry: Entry, box: Box) -> tuple[int, int] | None:
    """Return (byte offset, count) of a box inside its buffer if its bytes lie in one piece there, else None."""
    itemsize = entry.nbytes // max(entry.box.size, 1)
    inner = box.within(entry.box)
    strides = _strides(entry.box.shape)
    # In one piece: after the first axis that is cut, all axes are whole; before it, all have length one.
    cut = next(
        (i for i, (n, m) in enumerate(zip(inner.shape, entry.box.shape, strict=True)) if n != m),
        None,
    )
    if cut is not None:
        later = [i for i in range(cut + 1, len(strides)) if inner.shape[i] != entry.box.shape[i]]
        last_cut = later[-1] if later else cut
        if any(inner.shape[i] != 1 for i in range(last_cut)):
            return None
    start = sum(o * s for o, s in zip(inner.offset, strides, strict=True))
    return entry.byte_offset + start * itemsize, inner.size * itemsize


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
