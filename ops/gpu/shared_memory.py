"""Shared memory as keepstep's snapshot servers hand it to workers: a memfd, mapped and registered.

Registering pins pages, which is slow for pages that were never touched; so they are touched first,
by several threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from ops.gpu.cuda_runtime import runtime

# madvise(2); Python's mmap module does not name both, and its method keeps the GIL.
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
_TOUCHING_THREADS = 8
_PIECE_NBYTES = 1 << 30
_LEAST_NBYTES = 16 << 20


class SharedMemory:
    """A mapping of a memfd; the end of the context unmaps it.

    Args:
        nbytes: its size; a multiple of the page size.
        path: of another process's memory; None: new memory.
    """

    def __init__(self, nbytes: int, path: str | None = None) -> None:
        self.nbytes = nbytes
        if path is None:
            self.descriptor = os.memfd_create("keepstep-gpu-check")
            os.ftruncate(self.descriptor, nbytes)
        else:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._mapping = mmap.mmap(self.descriptor, nbytes)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)

    @property
    def path(self) -> str:
        """A path by which other processes of this user can open it while it is open here."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return self.tensor.data_ptr()

    def advise(self, advice: int) -> int:
        """Advise the kernel about all pages, in several threads; return the first error's code."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        share = -(-self.nbytes // _TOUCHING_THREADS // mmap.PAGESIZE) * mmap.PAGESIZE

        def advise(offset: int) -> int:
            length = min(share, self.nbytes - offset)
            failed = libc.madvise(self.address + offset, length, advice)
            return ctypes.get_errno() if failed else 0

        with ThreadPoolExecutor(_TOUCHING_THREADS) as pool:
            codes = list(pool.map(advise, range(0, self.nbytes, share)))
        return next((code for code in codes if code), 0)

    def touch(self) -> None:
        """Make the kernel allocate every page, in several threads."""
        # Linux before 5.14 does not know this advice.
        if self.advise(MADV_POPULATE_WRITE):
            self.tensor[:: mmap.PAGESIZE].fill_(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The mapping ends with the last tensor over it.
        del self.tensor, self._mapping
        os.close(self.descriptor)


def pieces(nbytes: int, piece_nbytes: int = _PIECE_NBYTES) -> list[tuple[int, int]]:
    """Return the offset and length of each piece of memory of this size."""
    return [
        (offset, min(piece_nbytes, nbytes - offset)) for offset in range(0, nbytes, piece_nbytes)
    ]


def register(address: int, nbytes: int) -> int:
    """Register host memory with CUDA, in a thread whose device is set; return the code."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        # Else the next kernel that this thread launches would report it.
        runtime().cudaGetLastError()
    return code


def unregister(address: int) -> int:
    """End the registration that began at an address; return the code."""
    return int(torch.cuda.cudart().cudaHostUnregister(address))


@contextmanager
def registered(memory: SharedMemory, parts: list[tuple[int, int]]) -> Iterator[int]:
    """Register parts of a mapping for the duration of the context; yield the first error's code."""
    codes = [register(memory.address + offset, nbytes) for offset, nbytes in parts]
    try:
        yield next((code for code in codes if code), 0)
    finally:
        for (offset, _), code in zip(parts, codes, strict=True):
            if code == 0:
                unregister(memory.address + offset)


def affordable_nbytes(wanted: int, processes: int = 1) -> int:
    """Return `wanted`, or a share of what the host or the GPU has free, in whole pages.

    Args:
        wanted: what a large machine should use.
        processes: number of processes that use as much of the host's memory at the same time.
    """
    available = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    free, _ = torch.cuda.mem_get_info()
    affordable = min(wanted, available // 4 // processes, free // 4)
    return max(_LEAST_NBYTES, affordable // _LEAST_NBYTES * _LEAST_NBYTES)
