"""G5: a live CUDA graph that captured a collective keeps an abort from returning.

Proves that graphs have to be destroyed before, or while, groups are aborted. Passes if an abort has
not returned after 10 s while the graph lives, and returns within 10 s once it is gone. Where it
returns at once, this NCCL waits no more, and destroying graphs first is needless caution.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from ops.gpu.check import Figures, Finding
from ops.gpu.groups import abort, all_groups, enter, wait_all
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_WAIT_S = 10.0


def check(machine: Machine) -> Finding:
    """Capture and abort on both ranks at the same time."""
    ranks = figures_of(run_ranks(capture_and_abort, 2, limit_s=50))
    return Finding(
        {
            "a captured collective is replayed": all(found["replayed"] for found in ranks),
            "an abort does not return while the graph lives": all(
                found["blocked"] for found in ranks
            ),
            "it returns once the graph is gone": all(found["returned"] for found in ranks),
        },
        {"rank 0": ranks[0], "rank 1": ranks[1]},
    )


def capture_and_abort(rank: Rank) -> Figures:
    """Abort with a live graph, then destroy the graph."""
    enter(rank)
    store = rank.store()
    value = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(value)
    rank.meet(store, "captured")
    graph.replay()
    torch.cuda.synchronize()
    # Capturing computes nothing: one sum before it, one in the replay.
    replayed = bool((value == rank.world_size**2).all().item())
    rank.meet(store, "replayed")
    calls = abort(all_groups(), rank.device)
    blocked = not wait_all(calls, _WAIT_S)
    graph.reset()
    del graph
    gc.collect()
    returned = wait_all(calls, _WAIT_S)
    rank.meet(store, "aborted")
    return {"replayed": replayed, "blocked": blocked, "returned": returned}
