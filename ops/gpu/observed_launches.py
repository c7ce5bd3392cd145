"""G11: what keepstep's recorder sees of each kind of operation on NCCL, and what that costs.

The recorder's library is NCCL's profiler plugin as well: it records events on the stream of each
launch. Proves that synchronous, asynchronous, point-to-point and coalesced operations get times of
the device, captured ones none, and that those are NCCL's own. Passes if that is so, the times of
asynchronous all-reduces are within 20 us of what PyTorch's own events say (the median),
and the host's time for a small operation (the best of 20 batches) is less than 2 us longer than
without recorder and plugin. Not run with NCCL before 2.28.3, or where the recorder cannot be built.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from ops.gpu.check import Figures, Finding, NotRun
from ops.gpu.environment import on_one_gpu
from ops.gpu.groups import enter
from ops.gpu.keepstep_tree import RECORDER_MODULES, recorder_library, require
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_FIRST_NCCL = (2, 28, 3)
# Two ranks that share a GPU take turns: a small operation takes some 13 ms there.
_BATCHES, _BATCH = 20, 20
_HOST_LIMIT_US = 2.0
_DEVICE_LIMIT_S = 20e-6
_TIMED_OPERATIONS = 20


def check(machine: Machine) -> Finding:
    """Run two ranks with recorder and plugin, and two without."""
    version = tuple(int(part) for part in machine.nccl.split(".")[:3])
    if version < _FIRST_NCCL:
        raise NotRun(f"NCCL {machine.nccl} has no profiler interface of version 5")
    require(*RECORDER_MODULES)
    library = recorder_library()
    if not hasattr(ctypes.CDLL(library), "ncclProfiler_v5"):
        raise NotRun("this recorder is no profiler plugin of NCCL")
    timing = {"TORCH_NCCL_ENABLE_TIMING": "1"}
    with tempfile.TemporaryDirectory(prefix="keepstep-gpu-rings-") as directory:
        recorded, _ = figures_of(
            run_ranks(
                observe,
                2,
                limit_s=30,
                environment=lambda rank: {
                    **on_one_gpu(rank),
                    **timing,
                    "NCCL_PROFILER_PLUGIN": library,
                },
                options={"directory": directory},
            )
        )
    plain, _ = figures_of(
        run_ranks(
            cost_of_small_operations,
            2,
            limit_s=20,
            environment=lambda rank: {**on_one_gpu(rank), **timing},
        )
    )
    kinds: Mapping[str, list[Mapping[str, Any]]] = recorded["kinds"]
    cost_us = recorded["small_us"] - plain["small_us"]
    claims = {
        f"{name} operations have times of the device": bool(kind)
        and all(operation["has_device_times"] for operation in kind)
        for name, kind in kinds.items()
        if name != "captured"
    }
    return Finding(
        {
            **claims,
            "captured operations have none": not any(
                operation["has_device_times"] for operation in kinds["captured"]
            ),
            "the times are those of PyTorch's events": recorded["difference_us"]
            < 1e6 * _DEVICE_LIMIT_S,
            "an operation costs less than 2 us": cost_us < _HOST_LIMIT_US,
        },
        {**recorded, "plain_us": plain["small_us"], "cost_us": round(cost_us, 2)},
    )


def observe(rank: Rank) -> Figures:
    """Call each kind of operation, and return what was recorded of it."""
    from ops.gpu.recorded_process import operations, recording

    with recording(rank.options["directory"], rank.rank) as reader:
        enter(rank)
        value = torch.ones(1 << 20, device="cuda")
        other = torch.empty_like(value)
        dist.all_reduce(value)
        torch.cuda.synchronize()
        kinds = {}
        for name, call in _CALLS.items():
            since = reader.operations.position
            call(rank, value, other)
            torch.cuda.synchronize()
            kinds[name] = operations(reader, since)
        since = reader.operations.position
        durations_s = []
        for _ in range(_TIMED_OPERATIONS):
            work = dist.all_reduce(value, async_op=True)
            work.wait()
            torch.cuda.synchronize()
            durations_s.append(work._get_duration() / 1e3)
        recorded_s = [operation["seconds"] for operation in operations(reader, since)]
        differences_s = [
            abs(seconds - duration_s)
            for seconds, duration_s in zip(recorded_s, durations_s, strict=False)
        ]
        return {
            "kinds": kinds,
            "difference_us": round(1e6 * statistics.median(differences_s), 1),
            "small_us": _small_us(),
        }


def cost_of_small_operations(rank: Rank) -> Figures:
    """Return what a small operation takes on the host, without a recorder."""
    enter(rank)
    return {"small_us": _small_us()}


def _small_us() -> float:
    """Return the host's time for one small operation, in microseconds."""
    value = torch.ones(1, device="cuda")
    host_s = []
    for _ in range(_BATCHES):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(_BATCH):
            dist.all_reduce(value)
        host_s.append((time.perf_counter() - began_s) / _BATCH)
    torch.cuda.synchronize()
    return round(1e6 * min(host_s), 2)


def _synchronous(rank: Rank, value: torch.Tensor, other: torch.Tensor) -> None:
    dist.all_reduce(value)


def _asynchronous(rank: Rank, value: torch.Tensor, other: torch.Tensor) -> None:
    dist.all_reduce(value, async_op=True).wait()


def _point_to_point(rank: Rank, value: torch.Tensor, other: torch.Tensor) -> None:
    peer = 1 - rank.rank
    batch = [dist.P2POp(dist.isend, value, peer), dist.P2POp(dist.irecv, other, peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def _coalesced(rank: Rank, value: torch.Tensor, other: torch.Tensor) -> None:
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(value)
        dist.all_reduce(other)
    manager.wait()


def _captured(rank: Rank, value: torch.Tensor, other: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(value)
    graph.replay()
    torch.cuda.synchronize()


_CALLS = {
    "synchronous": _synchronous,
    "asynchronous": _asynchronous,
    "point-to-point": _point_to_point,
    "coalesced": _coalesced,
    "captured": _captured,
}
