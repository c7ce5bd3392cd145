"""Maps the memory that snapshots live in: anonymous files (memfd) of the snapshot server.

One process owns a file; others map it by a descriptor that they are sent. A memfd has no name in
any file system, so nothing is left behind whichever process dies, and its size is not limited by
that of /dev/shm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.transport import FileRange

Bytes = npt.NDArray[np.uint8]

_POPULATE_THREADS = 8
_POPULATE_NBYTES = 64 * 2**20
# Of Linux's <asm-generic/mman-common.h>; Python does not name it.
_MADV_POPULATE_WRITE = 23


class Arena:
    """One mapped buffer of `nbytes` bytes. `close` unmaps it.

    The memory returns to the system when the last process has unmapped it.
    """

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, max(nbytes, 1), access=access)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Create a buffer of this size."""
        descriptor = os.memfd_create("keepstep-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
            return cls(descriptor, nbytes, writable=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def map(cls, descriptor: int, nbytes: int, *, writable: bool) -> Arena:
        """Map a buffer by a descriptor that was received; it is closed if that fails."""
        try:
            return cls(descriptor, nbytes, writable=writable)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def buffer(self) -> memoryview:
        """The buffer's bytes."""
        return memoryview(self._map)

    @property
    def unwritten_nbytes(self) -> int:
        """Bytes that take no memory yet, because nobody has written them; 0 once it is closed."""
        try:
            # The kernel counts in blocks of 512 bytes, whatever the size of a page.
            return max(0, self.nbytes - os.fstat(self.descriptor).st_blocks * 512)
        except OSError:
            return 0

    def populate(self) -> None:
        """Give all pages their memory, on several threads, and huge pages where there are any.

        Else each page gets its memory when it is first written to, one after the other. Systems
        that cannot do it (Linux before 5.14) go on as they did.
        """
        address, nbytes = self.bytes.ctypes.data, max(self.nbytes, 1)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
        with ThreadPoolExecutor(_POPULATE_THREADS) as threads:
            for offset in range(0, nbytes, _POPULATE_NBYTES):
                part = min(_POPULATE_NBYTES, nbytes - offset)
                threads.submit(libc.madvise, address + offset, part, _MADV_POPULATE_WRITE)

    def range(self, offset: int, count: int) -> FileRange:
        """Return `count` bytes from a byte offset on, to be sent without copying them.

        Raises:
            ValueError: the buffer ends before.
        """
        if offset < 0 or count < 0 or offset + count > self.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + count} are not in a buffer of {self.nbytes} bytes"
            )
        return FileRange(self.descriptor, offset, self.buffer[offset : offset + count])

    def close(self) -> None:
        """Unmap and close. Views that others still hold keep the mapping until they are gone."""
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            pass  # A tensor still views it; the mapping goes with that.
        os.close(self.descriptor)
        # The number may soon be another file's.
        self.descriptor = -1


def box_bytes(entry: Entry, memory: Bytes, box: Box) -> Bytes:
    """Return a view of a box's bytes: the box's shape plus a last axis of one element's bytes.

    Args:
        entry: the tensor's part that the memory holds.
        memory: the buffer that the entry describes.
        box: in global coordinates, inside the entry's box.
    """
    itemsize = entry.nbytes // max(entry.box.size, 1)
    entry_bytes = memory[entry.byte_offset : entry.byte_offset + entry.nbytes]
    whole = entry_bytes.reshape(*entry.box.shape, itemsize)
    return whole if box == entry.box else whole[box.slices_in(entry.box)]


def contiguous_range(entry: Entry, box: Box) -> tuple[int, int] | None:
    """Return (byte offset, byte count) of a box in its buffer; None if its bytes lie scattered."""
    itemsize = entry.nbytes // max(entry.box.size, 1)
    inner = box.within(entry.box)
    outer_shape = entry.box.shape
    cut_axes = [
        axis
        for axis, (length, full) in enumerate(zip(inner.shape, outer_shape, strict=True))
        if length != full
    ]
    # Contiguous means: every axis before the last one that is cut has length one.
    if cut_axes and any(length != 1 for length in inner.shape[: cut_axes[-1]]):
        return None
    strides = _strides(outer_shape)
    start = sum(offset * stride for offset, stride in zip(inner.offset, strides, strict=True))
    return entry.byte_offset + start * itemsize, inner.size * itemsize


def contiguous_tiles(values: Bytes, nbytes: int) -> Iterator[memoryview]:
    """Yield an array's bytes in C order; if they lie scattered, copied in tiles of `nbytes`."""
    if values.flags.c_contiguous or values.nbytes <= nbytes or values.ndim < 2:
        yield np.ascontiguousarray(values).reshape(-1).data
        return
    row_nbytes = max(1, values.nbytes // len(values))
    if row_nbytes > nbytes:
        for row in values:
            yield from contiguous_tiles(row, nbytes)
        return
    rows = nbytes // row_nbytes
    for first in range(0, len(values), rows):
        yield np.ascontiguousarray(values[first : first + rows]).reshape(-1).data


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
