"""N1: on which GPUs a rank has a context, its threads included.

A context takes about half a gigabyte; one of each rank on the first GPU adds up. Proves that a rank
that sets its device first in every thread, the one that copies to registered memory and the ones
that abort included, has a context on its own GPU only. Passes if rank 1 has none on the first GPU
after a group, a copy in a thread and an abort. Whether a thread that sets no device makes one is a
figure.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ops.gpu.background import BackgroundCall
from ops.gpu.check import Figures, Finding
from ops.gpu.cuda_runtime import has_context
from ops.gpu.environment import on_own_gpu
from ops.gpu.groups import enter, leave
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks
from ops.gpu.shared_memory import SharedMemory, registered

_NBYTES = 64 << 20


def check(machine: Machine) -> Finding:
    """Look at rank 1's contexts after each thing that a worker does."""
    _, found = figures_of(
        run_ranks(use_device, 2, limit_s=50, devices=(0, 1), environment=on_own_gpu)
    )
    return Finding(
        {
            "rank 1 has a context on its own GPU": found["own"],
            "a group makes none on the first GPU": not found["after_group"],
            "a copying thread that sets its device makes none": not found["after_copy"],
            "aborting in threads that set their device makes none": not found["after_abort"],
        },
        found,
    )


def use_device(rank: Rank) -> Figures:
    """Enter a group, copy to registered memory in a thread, abort; then forget the device once."""
    enter(rank)
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    found = {"own": has_context(rank.device), "after_group": has_context(0)}
    source = torch.ones(_NBYTES, dtype=torch.uint8, device="cuda")
    _run(_Copying(source), rank.device)
    found["after_copy"] = has_context(0)
    leave(rank.device)
    found["after_abort"] = has_context(0)
    _run(_Copying(source), None)
    found["after_copy_without_device"] = has_context(0)
    return found


class _Copying:
    """Copies a tensor into registered memory on a side stream, as a snapshot does."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._stream = torch.cuda.Stream(source.device)

    def __call__(self) -> None:
        with SharedMemory(_NBYTES) as memory, registered(memory, [(0, _NBYTES)]) as code:
            if code:
                raise RuntimeError(f"cudaHostRegister: {code}")
            with torch.cuda.stream(self._stream):
                memory.tensor.copy_(self._source, non_blocking=True)
            self._stream.synchronize()


def _run(copying: _Copying, device: int | None) -> None:
    call = BackgroundCall(copying, device).start()
    if not call.wait(10.0):
        raise TimeoutError("a copy has not ended within 10 s")
    if call.error is not None:
        raise call.error
