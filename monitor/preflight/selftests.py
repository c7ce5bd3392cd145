"""Measures a node by itself: memory bandwidth, matrix products, disk.

Everything is measured several times and the best counts: a test before a job asks what the node can
do, not what else it is doing.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keepstep.monitor.preflight.examination import DiskResult, MatmulResult

if TYPE_CHECKING:
    import torch

_MEMORY_NBYTES = 128 * 2**20
_DISK_NBYTES = 32 * 2**20
_DISK_BLOCK_NBYTES = 2**20
_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEATS = 5


def memory_rate() -> float:
    """Return bytes a second that one thread copies; reads and writes count once each."""
    source = np.ones(_MEMORY_NBYTES // 8)
    target = np.empty_like(source)
    np.copyto(target, source)  # The kernel provides a page at its first touch.
    best_s = min(_timed(lambda: np.copyto(target, source)) for _ in range(_REPEATS))
    return 2 * _MEMORY_NBYTES / best_s


def matmuls() -> tuple[MatmulResult, ...]:
    """Return the results of the processor and of every GPU."""
    # Loading it takes two seconds, which who is refused for an option does not wait.
    import torch

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return tuple(_matmul(device) for device in [torch.device("cpu"), *gpus])


def disk(directory: Path) -> DiskResult:
    """Write to a file in `directory`, which is removed again.

    Raises:
        OSError: there is no room, or no permission.
    """
    block = os.urandom(_DISK_BLOCK_NBYTES)
    descriptor, name = tempfile.mkstemp(prefix=".keepstep-doctor-", dir=directory)
    try:
        began_s = time.perf_counter()
        for _ in range(_DISK_NBYTES // _DISK_BLOCK_NBYTES):
            os.write(descriptor, block)
        os.fsync(descriptor)
        write_rate = _DISK_NBYTES / (time.perf_counter() - began_s)

        def write_little() -> None:
            os.pwrite(descriptor, block[:4096], 0)
            os.fsync(descriptor)

        fsync_s = min(_timed(write_little) for _ in range(_REPEATS))
        return DiskResult(write_rate=write_rate, fsync_s=fsync_s)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name)


def is_product(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> bool:
    """Whether `product` is `left @ right`, for matrices of small integers.

    By Freivalds' check (1977): with vectors of +1 and -1, and sums that float64 holds exactly, one
    wrong element cannot hide; wrong ones that cancel each other go undetected once in 256.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    signs = torch.randint(0, 2, (right.shape[1], 8), generator=generator) * 2.0 - 1.0
    signs = signs.to(product.device, torch.float64)
    claimed = product.double() @ signs
    return bool(torch.equal(claimed, left.double() @ (right.double() @ signs)))


def _matmul(device: torch.device) -> MatmulResult:
    import torch

    size = _MATRIX_SIZE[device.type]
    generator = torch.Generator().manual_seed(20)
    # Integers up to 4 in size: every partial sum of 8192 products stays below 2**24, so float32
    # is exact in any order, and TF32 too.
    left, right = (
        torch.randint(-4, 5, (size, size), generator=generator).float().to(device) for _ in range(2)
    )
    # With fractions the order of summation shows in the last bits: the same device must take the
    # same order again.
    fractions = torch.rand(size, size, generator=generator).to(device)
    digests: set[bytes] = set()
    times_s = []
    is_right = True
    for _ in range(_REPEATS):
        _synchronize(device)
        began_s = time.perf_counter()
        product = left @ right
        _synchronize(device)
        times_s.append(time.perf_counter() - began_s)
        is_right = is_right and is_product(left, right, product)
        digests.add(hashlib.sha256((fractions @ right).cpu().numpy().tobytes()).digest())
    return MatmulResult(
        device=str(device),
        flops=2 * size**3 / min(times_s),
        is_right=is_right,
        is_repeatable=len(digests) == 1,
    )


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
