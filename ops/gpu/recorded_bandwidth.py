"""N6: the speed of collectives between GPUs with and without keepstep's recorder.

Proves that observing operations does not slow large ones. Passes if all-reduces of 256 MiB keep
95 % of their speed with the recorder, which is NCCL's profiler plugin as well. Not run where the
recorder cannot be built.
"""

from __future__ import annotations

import statistics
import tempfile

import torch
import torch.distributed as dist

from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_own_gpu
from ops.gpu.groups import enter
from ops.gpu.keepstep_tree import RECORDER_MODULES, recorder_library, require
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_NBYTES = 256 << 20
_OPERATIONS = 50
_KEPT_SHARE = 0.95


def check(machine: Machine) -> Finding:
    """Measure processes with recorder and plugin, and processes without."""
    require(*RECORDER_MODULES)
    library = recorder_library()
    world_size = len(machine.gpus)

    def run(directory: str) -> Figures:
        variables = {"NCCL_PROFILER_PLUGIN": library} if directory else {}
        return figures_of(
            run_ranks(
                measure,
                world_size,
                limit_s=20,
                devices=range(world_size),
                environment=lambda rank: {**on_own_gpu(rank), **variables},
                options={"directory": directory},
            )
        )[0]

    plain = run("")
    with tempfile.TemporaryDirectory(prefix="keepstep-gpu-rings-") as directory:
        recorded = run(directory)
    return Finding(
        {
            "all-reduces keep 95 % of their speed": recorded["gigabytes_per_s"]
            >= _KEPT_SHARE * plain["gigabytes_per_s"]
        },
        {"plain": plain, "recorded": recorded},
    )


def measure(rank: Rank) -> Figures:
    """Return the bus bandwidth of all-reduces, as nccl-tests compute it."""
    if not rank.options["directory"]:
        return _measure(rank)
    from ops.gpu.recorded_process import recording

    with recording(rank.options["directory"], rank.rank):
        return _measure(rank)


def _measure(rank: Rank) -> Figures:
    enter(rank)
    value = torch.ones(_NBYTES // 4, device="cuda")
    times_ms = []
    for _ in range(_OPERATIONS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        dist.all_reduce(value)
        ended.record()
        ended.synchronize()
        times_ms.append(began.elapsed_time(ended))
    moved_nbytes = 2 * (rank.world_size - 1) / rank.world_size * _NBYTES
    return {"gigabytes_per_s": round(moved_nbytes / 1e6 / statistics.median(times_ms), 1)}
