"""N4: groups of all GPUs are rebuilt several times in the same processes, with and without NVLS.

NVLS needs multicast slots of the NVSwitch, which are scarce, and are returned late by processes
that died. Proves that without NVLS, which is keepstep's default, rebuilding always succeeds. Passes
if it does, six times. With NVLS the times, or how it fails, are figures.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_own_gpu
from ops.gpu.groups import enter, leave
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, RankResult, run_ranks

_ROUNDS = 6
_NBYTES = 64 << 20


def check(machine: Machine) -> Finding:
    """Rebuild without NVLS, then with it."""
    world_size = len(machine.gpus)

    def run(nvls: str) -> RankResult:
        return run_ranks(
            rebuild,
            world_size,
            limit_s=26,
            generations=_ROUNDS,
            devices=range(world_size),
            environment=lambda rank: {**on_own_gpu(rank), "NCCL_NVLS_ENABLE": nvls},
        )[0]

    without, with_nvls = run("0"), run("1")
    found = without.figures or {"sums": []}
    return Finding(
        {
            "every rebuild without NVLS sums over all GPUs": found["sums"]
            == [float(world_size)] * _ROUNDS,
        },
        {
            "without": without.figures or without.error or "not done in time",
            "with": with_nvls.figures or with_nvls.error or "not done in time",
        },
    )


def rebuild(rank: Rank) -> Figures:
    """Build, sum and leave; return the sums and what each round took."""
    sums, built_s = [], []
    for generation in range(_ROUNDS):
        began_s = time.monotonic()
        enter(rank, generation=generation)
        value = torch.ones(_NBYTES // 4, device="cuda")
        dist.all_reduce(value)
        sums.append(value.max().item())
        built_s.append(round(time.monotonic() - began_s, 2))
        rank.meet(rank.store(generation), "summed")
        leave(rank.device)
    return {"sums": sums, "built_s": built_s}
