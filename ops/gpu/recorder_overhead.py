"""G12: what keepstep's recorder adds to an operation, in time and in memory of the GPU.

Proves that observing operations holds no tensor: a recorder that follows futures keeps outputs
alive until the host has polled an event. Passes if 10,000 all-gathers of 1 KiB, asynchronous and
with outputs that are dropped at once, allocate at the peak no more than a tenth more memory with
the recorder than without it. The host's time per operation is a figure. Not run where the recorder
cannot be built.
"""

from __future__ import annotations

import tempfile
import time

import torch
from torch.distributed import ProcessGroup

from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_one_gpu
from ops.gpu.groups import all_gather, enter
from ops.gpu.keepstep_tree import RECORDER_MODULES, recorder_library, require
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_OPERATIONS = 10_000
_BATCH = 100
_NBYTES = 1024
_GROWTH = 1.1


def check(machine: Machine) -> Finding:
    """Measure the same process without and then with the recorder."""
    require(*RECORDER_MODULES)
    library = recorder_library()
    with tempfile.TemporaryDirectory(prefix="keepstep-gpu-rings-") as directory:
        (found,) = figures_of(
            run_ranks(
                measure,
                1,
                limit_s=30,
                environment=lambda rank: {**on_one_gpu(rank), "NCCL_PROFILER_PLUGIN": library},
                options={"directory": directory},
            )
        )
    plain, recorded = found["plain"], found["recorded"]
    return Finding(
        {
            f"{kind} operations keep no memory": recorded[kind]["peak_nbytes"]
            <= _GROWTH * plain[kind]["peak_nbytes"]
            for kind in ("synchronous", "asynchronous")
        },
        found,
    )


def measure(rank: Rank) -> Figures:
    """Call operations, attach the recorder, and call them again."""
    from ops.gpu.recorded_process import recording

    group = enter(rank)
    _measure_kinds(group)
    plain = _measure_kinds(group)
    with recording(rank.options["directory"], rank.rank) as reader:
        since = reader.operations.position
        recorded = _measure_kinds(group)
        count = reader.operations.position - since
    return {"plain": plain, "recorded": recorded, "operations_recorded": count}


def _measure_kinds(group: ProcessGroup) -> Figures:
    return {
        "synchronous": _measure(group, asynchronous=False),
        "asynchronous": _measure(group, asynchronous=True),
    }


def _measure(group: ProcessGroup, *, asynchronous: bool) -> Figures:
    source = torch.ones(_NBYTES // 4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    host_s = 0.0
    for _ in range(_OPERATIONS // _BATCH):
        began_s = time.perf_counter()
        for _ in range(_BATCH):
            work = all_gather(group, torch.empty_like(source), source, asynchronous=asynchronous)
            if work is not None:
                work.wait()
        host_s += time.perf_counter() - began_s
        torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    return {
        "host_us": round(1e6 * host_s / _OPERATIONS, 2),
        "peak_nbytes": statistics["allocated_bytes.all.peak"],
        "peak_reserved_nbytes": statistics["reserved_bytes.all.peak"],
        "allocations": statistics["allocation.all.current"],
    }
