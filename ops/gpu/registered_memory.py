"""G7: shared memory is registered with CUDA in a thread, and tensors are copied into it.

Proves that what snapshots do works: a memfd, touched or not, as a whole or in pieces of 1 GiB, is
registered by a thread other than the main one, and copies into it return before they are done.
Passes if every registration succeeds, a copy of one tensor is queued within 1 ms where pages were
touched before, the bytes are equal, the memory can be registered again once it is unregistered, and
a transposed tensor is copied without memory of the GPU where the host's strides are the same. Speed
is a figure: about 55 GB/s on PCIe 5 x16, less in virtual machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from ops.gpu.background import BackgroundCall
from ops.gpu.check import Figures, Finding
from ops.gpu.cuda_runtime import ALREADY_REGISTERED
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks
from ops.gpu.shared_memory import (
    MADV_HUGEPAGE,
    SharedMemory,
    affordable_nbytes,
    pieces,
    register,
    registered,
    unregister,
)

_NBYTES = 8 << 30
_COPIES = 3
_LIMIT_S = 45.0
_QUEUE_LIMIT_MS = 1.0
_KINDS = ("untouched", "touched", "touched in pieces", "huge pages in pieces")


def check(machine: Machine) -> Finding:
    """Copy into each kind of memory, from a thread of one process."""
    (found,) = figures_of(run_ranks(measure, 1, limit_s=52))
    kinds: Mapping[str, Mapping[str, Any]] = found["kinds"]
    return Finding(
        {
            "every registration succeeds": all(kind["code"] == 0 for kind in kinds.values()),
            "PyTorch takes the memory for pinned": all(kind["pinned"] for kind in kinds.values()),
            "copies are queued within 1 ms": all(
                kind["queue_ms"] < _QUEUE_LIMIT_MS
                for name, kind in kinds.items()
                if name != "untouched"
            ),
            "the bytes are equal": all(kind["equal"] for kind in kinds.values()),
            "registering twice is refused as such": found["twice"] == ALREADY_REGISTERED,
            "memory that was unregistered is registered again": found["again"] == 0,
            "equal strides need no memory of the GPU": found["same_strides_nbytes"] == 0,
        },
        found,
    )


def measure(rank: Rank) -> Figures:
    """Measure every kind, each in a thread that sets its device."""
    torch.cuda.set_device(rank.device)
    nbytes = affordable_nbytes(_NBYTES)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    found: dict[str, Any] = {"nbytes": nbytes, "kinds": {}}

    def run() -> None:
        for kind in _KINDS:
            found["kinds"][kind] = _measure_kind(kind, source)
        found.update(_measure_edges())

    call = BackgroundCall(run, rank.device).start()
    if not call.wait(_LIMIT_S):
        raise TimeoutError(f"not done within {_LIMIT_S:.0f} s; so far: {found}")
    if call.error is not None:
        raise call.error
    return found


def _measure_kind(kind: str, source: torch.Tensor) -> Figures:
    with SharedMemory(source.nbytes) as memory:
        parts = pieces(memory.nbytes) if "pieces" in kind else [(0, memory.nbytes)]
        began_s = time.monotonic()
        advice = memory.advise(MADV_HUGEPAGE) if "huge" in kind else 0
        if kind != "untouched":
            memory.touch()
        touched_s = time.monotonic()
        with registered(memory, parts) as code:
            registered_s = time.monotonic()
            queue_ms, gigabytes_per_s = _copy(source, memory.tensor, parts)
            equal = all(
                torch.equal(
                    memory.tensor[end - (1 << 20) : end], source[end - (1 << 20) : end].cpu()
                )
                for end in (offset + length for offset, length in parts)
            )
            pinned = memory.tensor.is_pinned()
    return {
        "code": code,
        "advice_code": advice,
        "touch_s": round(touched_s - began_s, 2),
        "register_s": round(registered_s - touched_s, 2),
        "queue_ms": round(queue_ms, 3),
        "gigabytes_per_s": round(gigabytes_per_s, 1),
        "pinned": pinned,
        "equal": equal,
    }


def _copy(
    source: torch.Tensor, target: torch.Tensor, parts: list[tuple[int, int]]
) -> tuple[float, float]:
    """Copy some times; return the median time to queue a part, in ms, and the last speed."""
    stream, done = torch.cuda.Stream(), torch.cuda.Event(blocking=True)
    stream.wait_stream(torch.cuda.current_stream())
    queue_s: list[float] = []
    speed = 0.0
    for _ in range(_COPIES):
        began_s = time.monotonic()
        with torch.cuda.stream(stream):
            for offset, nbytes in parts:
                # A copy must not span two registrations.
                span = slice(offset, offset + nbytes)
                part_s = time.monotonic()
                target[span].copy_(source[span], non_blocking=True)
                queue_s.append(time.monotonic() - part_s)
            done.record(stream)
        done.synchronize()
        speed = source.nbytes / 1e9 / (time.monotonic() - began_s)
    return 1e3 * statistics.median(queue_s), speed


def _measure_edges() -> Figures:
    """Return what registering twice and again returns, and what copies of a transposed tensor take.

    The copy is asynchronous and needs no memory only if both sides have the same strides.
    """
    rows, columns = 2048, 1024
    with SharedMemory(rows * columns * 4) as memory:
        first = register(memory.address, memory.nbytes)
        twice = register(memory.address, memory.nbytes)
        ended = unregister(memory.address)
        again = register(memory.address, memory.nbytes)
        transposed = torch.ones(rows, columns, device="cuda").t()
        flat = memory.tensor.view(torch.float32)
        # The memory of the transposed tensor is that of a contiguous one of (rows, columns).
        same_strides = _extra_nbytes(flat.view(rows, columns).t(), transposed)
        contiguous = _extra_nbytes(flat.view(columns, rows), transposed)
        unregister(memory.address)
        del flat
    return {
        "twice": twice,
        "again": first or ended or again,
        "same_strides_nbytes": same_strides,
        "contiguous_target_nbytes": contiguous,
    }


def _extra_nbytes(target: torch.Tensor, source: torch.Tensor) -> int:
    """Return the memory of the GPU that a copy allocates in passing."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
