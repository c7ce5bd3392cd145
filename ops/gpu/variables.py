"""G13: what the environment variables change that keepstep sets for its workers.

Two effects are measured, each in a process with PyTorch's defaults and in one with ours. A group's
destructor may wait for a heartbeat's whole interval: a group is built, aborted and dropped up to
fifty times, and the longest time to drop one is kept. And a collective that has timed out lets the
watchdog sleep with a lock that the next asynchronous one needs: how long that call takes is kept.
Passes if with our variables dropping a group takes 25 s at most and the call less than 10 s: with
the lock the watchdog also finds out where the collective was called, for which it imports modules
of PyTorch, once (3 s on an H200). With the defaults both are figures.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from ops.gpu.background import BackgroundCall, described
from ops.gpu.check import Figures, Finding
from ops.gpu.environment import RECOVERY, on_one_gpu
from ops.gpu.groups import abort, all_groups, enter, wait_all
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, RankFunction, RankResult, figures_of, run_ranks

_ROUNDS = 50
_DROPPING_S = 28.0
_LIMIT_S = 48.0
_DROP_LIMIT_S = 25.0
_TIMEOUT = timedelta(seconds=3)
_CALL_LIMIT_S = 10.0
_CALL_WAIT_S = 25.0
# Without these the watchdog ends the process before anything can be measured.
_KEPT = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


def check(machine: Machine) -> Finding:
    """Run both measurements in both environments, all at the same time."""

    def run(function: RankFunction, ranks: int, ours: bool) -> list[RankResult]:
        return run_ranks(
            function,
            ranks,
            limit_s=_LIMIT_S,
            generations=_ROUNDS if function is drop_groups else 1,
            environment=_ours if ours else _defaults,
        )

    cases = [
        (drop_groups, 1, True),
        (drop_groups, 1, False),
        (call_after_timeout, 2, True),
        (call_after_timeout, 2, False),
    ]
    with ThreadPoolExecutor() as pool:
        dropped, dropped_default, called, called_default = pool.map(lambda case: run(*case), cases)
    (drops,) = figures_of(dropped)
    call, _ = figures_of(called)
    return Finding(
        {
            "a group is dropped within 25 s": drops["longest_s"] <= _DROP_LIMIT_S,
            "a call after a timeout takes less than 10 s": call["call_s"] < _CALL_LIMIT_S,
        },
        {
            "dropping": drops,
            "dropping_default": _or_killed(dropped_default[0]),
            "call_after_timeout": call,
            "call_after_timeout_default": _or_killed(called_default[0]),
        },
    )


def drop_groups(rank: Rank) -> Figures:
    """Build, abort and drop groups of one rank; return the longest time to drop one."""
    dropped_s: list[float] = []
    began_s = time.monotonic()
    for generation in range(_ROUNDS):
        if time.monotonic() - began_s > _DROPPING_S:
            break
        group = enter(rank, generation=generation)
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        wait_all(abort(all_groups(), rank.device), _DROP_LIMIT_S)
        drop_s = time.monotonic()
        dist.destroy_process_group()
        del group
        gc.collect()
        dropped_s.append(time.monotonic() - drop_s)
    return {"rounds": len(dropped_s), "longest_s": round(max(dropped_s), 2)}


def call_after_timeout(rank: Rank) -> Figures:
    """Let a collective time out that the peer never enters; return what the next call takes."""
    enter(rank, timeout=_TIMEOUT)
    store = rank.store()
    value = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    rank.meet(store, "built")
    if rank.rank != 0:
        store.wait(["called"])
        return {}
    pending = [dist.all_reduce(value, async_op=True)]
    time.sleep(2 * _TIMEOUT.total_seconds())
    call = BackgroundCall(
        lambda: pending.append(dist.all_reduce(value, async_op=True)), rank.device
    ).start()
    returned = call.wait(_CALL_WAIT_S)
    store.set("called", "yes")
    return {
        "returned": returned,
        "call_s": round(call.took_s if returned else _CALL_WAIT_S, 3),
        "error": described(call.error),
    }


def _ours(rank: int) -> Mapping[str, str]:
    return on_one_gpu(rank)


def _defaults(rank: int) -> Mapping[str, str]:
    return {
        name: value
        for name, value in on_one_gpu(rank).items()
        if name in _KEPT or name not in RECOVERY
    }


def _or_killed(result: RankResult) -> Figures:
    return result.figures or {"killed_after_s": _LIMIT_S, "error": result.error}
