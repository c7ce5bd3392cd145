"""What a node can find out about itself: memory bandwidth, matrix products, disk. Nothing here talks to anybody.

Everything is measured several times and the best counts: a test before a job asks what the node can do, not what else it is
doing.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

_MEMORY_NBYTES = 128 * 2**20
_DISK_NBYTES = 32 * 2**20
_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MatmulResult:
    """A device's matrix products: operations a second, whether they were right, and whether repeats gave the same bits."""

    device: str
    flops: float
    is_right: bool
    is_repeatable: bool


@dataclass(frozen=True, slots=True)
class DiskResult:
    """Bytes a second of writing with fsync, and seconds of an fsync of one small write."""

    write_rate: float
    fsync_s: float


def memory_rate() -> float:
    """Return bytes a second copied within memory by one thread; reading and writing count once each."""
    source = np.ones(_MEMORY_NBYTES // 8)
    target = np.empty_like(source)
    np.copyto(target, source)  # The first touch of a page is the kernel's work, not the memory's.
    best_s = min(_timed(lambda: np.copyto(target, source)) for _ in range(_REPEATS))
    return 2 * _MEMORY_NBYTES / best_s


def matmuls() -> tuple[MatmulResult, ...]:
    """Return the results of the processor and of every GPU."""
    devices = [
        torch.device("cpu"),
        *(torch.device("cuda", index) for index in range(torch.cuda.device_count())),
    ]
    return tuple(map(_matmul, devices))


def disk(directory: Path) -> DiskResult:
    """Write to a file in `directory`, which is removed again.

    Raises:
        OSError: there is no room, or no right to.
    """
    block = os.urandom(1 << 20)
    descriptor, name = tempfile.mkstemp(prefix=".keepstep-doctor-", dir=directory)
    try:
        began_s = time.perf_counter()
        for _ in range(_DISK_NBYTES >> 20):
            os.write(descriptor, block)
        os.fsync(descriptor)
        rate = _DISK_NBYTES / (time.perf_counter() - began_s)

        def write_little() -> None:
            os.pwrite(descriptor, block[:4096], 0)
            os.fsync(descriptor)

        return DiskResult(rate, min(_timed(write_little) for _ in range(_REPEATS)))
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name)


def is_product(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> bool:
    """Return whether `product` is `left @ right`, for matrices of small integers, by Freivalds' check (1977).

    With vectors of +1 and -1, and sums that float64 holds exactly, one wrong element cannot hide; wrong ones that cancel each other
    go undetected once in 256.
    """
    signs = (
        torch.randint(0, 2, (right.shape[1], 8), generator=torch.Generator().manual_seed(7)) * 2.0
        - 1.0
    )
    signs = signs.to(product.device, torch.float64)
    claimed = product.double() @ signs
    return bool(torch.equal(claimed, left.double() @ (right.double() @ signs)))


def _matmul(device: torch.device) -> MatmulResult:
    size = _SIZE[device.type]
    generator = torch.Generator().manual_seed(20)
    # Integers to 4 in size: every partial sum of 8192 products stays below 2**24, so float32 is exact in any order, TF32 too.
    left, right = (
        torch.randint(-4, 5, (size, size), generator=generator).float().to(device) for _ in range(2)
    )
    # And fractions, where the order of summation shows in the last bits: the same device must take the same order again.
    uneven = torch.rand(size, size, generator=generator).to(device)
    digests, times, right_each = set(), [], True

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(_REPEATS):
        wait()
        began_s = time.perf_counter()
        product = left @ right
        wait()
        times.append(time.perf_counter() - began_s)
        right_each = right_each and is_product(left, right, product)
        digests.add(hashlib.sha256((uneven @ right).cpu().numpy().tobytes()).digest())
    return MatmulResult(str(device), 2 * size**3 / min(times), right_each, len(digests) == 1)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
