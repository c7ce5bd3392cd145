"""G6: a rank initializes NCCL while its peer never comes.

Proves that a deadline for initialization must be kept from outside: blocking NCCL waits until the
process is killed. Passes if it does, and if non-blocking NCCL, with a timeout of 10 s, raises
DistBackendError after about that time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from ops.gpu.background import described
from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_one_gpu
from ops.gpu.groups import enter
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, RankResult, run_ranks

_BLOCKING_LIMIT_S = 25
_NONBLOCKING_LIMIT_S = 40
_NONBLOCKING = {
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
}


def check(machine: Machine) -> Finding:
    """Start rank 0 of two alone, in both ways at the same time."""

    def run(blocking: bool) -> RankResult:
        (result,) = run_ranks(
            initialize_alone,
            2,
            present=[0],
            limit_s=_BLOCKING_LIMIT_S if blocking else _NONBLOCKING_LIMIT_S,
            environment=lambda rank: {**on_one_gpu(rank), **({} if blocking else _NONBLOCKING)},
        )
        return result

    with ThreadPoolExecutor() as pool:
        blocking, nonblocking = pool.map(run, (True, False))
    given_up = nonblocking.figures or {}
    print(nonblocking.output[-2000:])
    return Finding(
        {
            "blocking initialization waits until it is killed": blocking.timed_out,
            "non-blocking initialization raises DistBackendError": given_up.get(
                "error", ""
            ).startswith("DistBackendError"),
            "it does so after about 10 s": 8.0 <= given_up.get("seconds", 0.0) <= 25.0,
        },
        {
            "blocking": {"killed": blocking.timed_out, **(blocking.figures or {})},
            "nonblocking": {"killed": nonblocking.timed_out, **given_up},
        },
    )


def initialize_alone(rank: Rank) -> Figures:
    """Enter the group and use it once; return how that ended."""
    began_s, error = time.monotonic(), ""
    try:
        enter(rank)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
    except RuntimeError as caught:
        error = described(caught)
    return {"error": error, "seconds": round(time.monotonic() - began_s, 1)}
