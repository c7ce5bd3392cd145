"""N3: what a rank gets that has not aborted, from a peer that has.

An aborting kernel may go on to tell its peers that data has arrived which it has not moved. Of
three ranks, one never enters the collective, one aborts after 2 s, and one waits. For each protocol
of NCCL the check records whether the waiting rank's kernel ends, and with what values. keepstep
does not rely on either: it fences all ranks before any aborts. Passes if each protocol was
observed.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_own_gpu
from ops.gpu.groups import abort, all_groups, enter, wait_all
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, RankResult, run_ranks

_PROTOCOLS = ("Simple", "LL", "LL128")
_ELEMENTS = 1 << 18
_ABORT_AFTER_S = 2.0
_WATCH_S = 3.0


def check(machine: Machine) -> Finding:
    """Observe each protocol, one after another."""

    def run(protocol: str) -> RankResult:
        return run_ranks(
            wait_for_aborted,
            3,
            limit_s=18,
            devices=(0, 1, 2),
            environment=lambda rank: {**on_own_gpu(rank), "NCCL_PROTO": protocol},
        )[1]

    results = {protocol: run(protocol) for protocol in _PROTOCOLS}
    return Finding(
        {
            f"the waiting rank was observed with {protocol}": result.figures is not None
            for protocol, result in results.items()
        },
        {protocol: result.figures or result.error for protocol, result in results.items()},
    )


def wait_for_aborted(rank: Rank) -> Figures:
    """Rank 0 enters and aborts, rank 1 enters and waits, rank 2 does not enter."""
    enter(rank)
    store = rank.store()
    value = torch.ones(_ELEMENTS, device="cuda")
    dist.all_reduce(value)
    value.fill_(1.0)
    torch.cuda.synchronize()
    rank.meet(store, "built")
    if rank.rank == 2:
        store.wait(["observed"])
        return {}
    dist.all_reduce(value)
    done = torch.cuda.Event()
    done.record()
    if rank.rank == 0:
        time.sleep(_ABORT_AFTER_S)
        store.set("aborting", "yes")
        wait_all(abort(all_groups(), rank.device), _WATCH_S)
        store.wait(["observed"])
        return {}
    store.wait(["aborting"])
    until_s = time.monotonic() + _WATCH_S
    while not done.query() and time.monotonic() < until_s:
        time.sleep(0.01)
    ended = done.query()
    # As text: JSON has no numbers for what garbage may hold.
    values = [str(found) for found in value.unique()[:5].tolist()] if ended else []
    store.set("observed", "yes")
    return {"ended": ended, "values": values}
