"""G3: two NCCL ranks on one GPU build their groups and leave them, four times over.

Proves that groups are rebuilt in the same processes, which recovery in place is made of, and says
what building costs. Passes if each of four rounds sums rightly in the default group and in one
split from it, takes less than 2 s to leave, and the GPU's free memory does not fall by more than
64 MiB from the second on. Nothing else may use the GPU meanwhile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_one_gpu
from ops.gpu.groups import enter, leave
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_ROUNDS = 4
_LEAVE_LIMIT_S = 2.0
_LEAK_NBYTES = 64 << 20
_TIMINGS = re.compile(r"Init timings[^\n]*")


def check(machine: Machine) -> Finding:
    """Run both ranks, with NCCL's own account of what initialization took."""
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
    results = run_ranks(
        rebuild,
        2,
        limit_s=52,
        generations=_ROUNDS,
        environment=lambda rank: {**on_one_gpu(rank), **debug},
    )
    ranks = figures_of(results)
    rounds = [figures for rank in ranks for figures in rank["rounds"]]
    return Finding(
        {
            "every round sums over both ranks": all(
                figures["sums"] == [2.0, 2.0] for figures in rounds
            ),
            "groups are left within 2 s": all(
                figures["left_s"] < _LEAVE_LIMIT_S for figures in rounds
            ),
            "free memory does not fall from the second round on": all(
                fall([figures["free_nbytes"] for figures in rank["rounds"][1:]]) <= _LEAK_NBYTES
                for rank in ranks
            ),
        },
        {"rank 0": ranks[0]["rounds"], "init_timings": _TIMINGS.findall(results[0].output)[:2]},
    )


def fall(nbytes: Sequence[int]) -> int:
    """Return by how much the least of these numbers of bytes is below the first."""
    return nbytes[0] - min(nbytes)


def rebuild(rank: Rank) -> Figures:
    """Build, sum and leave, in each generation's store."""
    rounds = []
    for generation in range(_ROUNDS):
        store = rank.store(generation)
        began_s = time.monotonic()
        enter(rank, generation=generation)
        sums = [_sum(None)]
        built_s = time.monotonic() - began_s
        child = dist.split_group(split_ranks=[list(range(rank.world_size))])
        sums.append(_sum(child))
        split_s = time.monotonic() - began_s - built_s
        rank.meet(store, "summed")
        began_s = time.monotonic()
        del child
        leave(rank.device)
        left_s = time.monotonic() - began_s
        # Free memory is that of the GPU: the other rank must not be building or leaving.
        rank.meet(store, "left")
        free, _ = torch.cuda.mem_get_info()
        rank.meet(store, "measured")
        rounds.append(
            {
                "built_s": round(built_s, 2),
                "split_s": round(split_s, 2),
                "left_s": round(left_s, 2),
                "sums": sums,
                "free_nbytes": free,
            }
        )
    return {"rounds": rounds}


def _sum(group: dist.ProcessGroup | None) -> float:
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value, group=group)
    return value.item()
