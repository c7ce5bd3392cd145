"""Memory that a device reads into and writes from, past the page cache.

It is aligned as such reads and writes require, and lies in large pages where the system has them:
a device is asked for each piece of memory that is contiguous for it, and of ordinary pages each is
one. It is used again, because new memory is mapped and cleared page by page.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.format.layout.integers import round_up

BLOCK_NBYTES = mmap.PAGESIZE
"""Bytes that divide addresses, offsets and sizes."""

LARGE_PAGE_NBYTES = 2 * 2**20
"""Bytes that a device transfers as one piece of memory, where the system has large pages."""

Bytes = npt.NDArray[np.uint8]


def allocate(nbytes: int) -> Bytes:
    """Return aligned memory of at least this size; more than half a large page in large pages.

    Raises:
        MemoryError, OverflowError: there is none.
    """
    if nbytes <= LARGE_PAGE_NBYTES // 2:
        return np.frombuffer(_map(round_up(max(1, nbytes), BLOCK_NBYTES)), np.uint8)
    size = round_up(nbytes, LARGE_PAGE_NBYTES)
    # What lies before the first large page, and after the last one, takes no memory.
    mapped = _map(size + LARGE_PAGE_NBYTES)
    with suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    first = -memory.ctypes.data % LARGE_PAGE_NBYTES
    return memory[first : first + size]


def _map(nbytes: int) -> mmap.mmap:
    try:
        # Shared memory, Python's default, has large pages only if the system is set up for it.
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        # EAGAIN: of memory that this process may lock.
        if error.errno in (errno.ENOMEM, errno.EAGAIN):
            raise MemoryError(f"no memory for {nbytes} bytes") from error
        raise


class TransferMemory:
    """Memory of one thread, for one transfer after the other."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of_size(self, nbytes: int) -> Bytes:
        """Return the memory, of this size at least; the next call returns it too.

        Raises as `allocate` does.
        """
        if self._memory.nbytes < nbytes:
            self._memory = allocate(nbytes)
        return self._memory


class TransferPool:
    """Memory of several threads. Thread-safe.

    It holds at most as many pieces as were in use at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused: list[Bytes] = []

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[Bytes]:
        """Yield memory of this size. Raises as `allocate` does."""
        memory = None
        with self._lock:
            self._unused.sort(key=lambda unused: unused.nbytes)
            fitting = [n for n, unused in enumerate(self._unused) if unused.nbytes >= nbytes]
            if fitting:
                memory = self._unused.pop(fitting[0])
            elif self._unused:
                # All are too small: a new one takes the place of the largest.
                self._unused.pop()
        if memory is None:
            memory = allocate(nbytes)
        try:
            yield memory[:nbytes]
        finally:
            with self._lock:
                self._unused.append(memory)

    def trim(self, nbytes: int) -> None:
        """Free unused memory, the largest first, until so many bytes are left at most."""
        with self._lock:
            self._unused.sort(key=lambda memory: memory.nbytes)
            while sum(memory.nbytes for memory in self._unused) > nbytes:
                self._unused.pop()
