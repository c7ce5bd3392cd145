"""G4: a collective hangs with the host ahead of it; what an abort does to it and to what follows.

Proves why keepstep fences before it aborts: the abort frees the stream, nothing raises, and what
was queued behind the collective, as an optimizer's kernels are, runs on garbage. Passes if the rank
is freed within 10 s without an exception, the queued kernel has run on another value than a
complete collective gives, and the next collective raises. Then `crosswise_abort` shows on the same
GPU that two groups, each hung on another rank, are aborted at once.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ops.gpu.background import BackgroundCall, described
from ops.gpu.check import Figures, Finding
from ops.gpu.crosswise_abort import check_on_one_gpu
from ops.gpu.groups import abort, all_groups, enter, wait_all
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks

_ELEMENTS = 1 << 22
_HUNG_S = 3.0
_FREED_LIMIT_S = 10.0
# As text: JSON has no numbers for what garbage may hold.
_COMPLETE = "2.0"


def check(machine: Machine) -> Finding:
    """Hang a collective of two ranks, and then two groups crosswise."""
    found, _ = figures_of(run_ranks(hang_and_abort, 2, limit_s=24))
    crosswise = check_on_one_gpu(machine)
    return Finding(
        {
            "a collective hangs while its peer stays away": found["hung"],
            "the abort frees the stream within 10 s": found["freed"],
            "the abort raises nothing in the thread that waits": found["freed"]
            and not found["error"],
            "what was queued behind the collective has run": found["queued_ran"],
            "it has run on garbage": _COMPLETE not in found["values"],
            "the next collective raises": bool(found["next_error"]),
            **crosswise.claims,
        },
        {**found, "crosswise": crosswise.figures},
    )


def hang_and_abort(rank: Rank) -> Figures:
    """Hang rank 0 in a collective that rank 1 never enters; then abort both."""
    enter(rank)
    store = rank.store()
    gradient = torch.ones(_ELEMENTS, device="cuda")
    weight = torch.zeros_like(gradient)
    dist.all_reduce(gradient)
    gradient.fill_(1.0)
    # CUDA loads a kernel when it is first called, and waits for those that run: one would hang.
    weight.add_(gradient).zero_()
    torch.cuda.synchronize()
    if rank.rank != 0:
        store.wait(["found"])
        wait_all(abort(all_groups(), rank.device), _FREED_LIMIT_S)
        return {}
    try:
        return _abort_hung(rank, gradient, weight)
    finally:
        store.set("found", "yes")


def _abort_hung(rank: Rank, gradient: torch.Tensor, weight: torch.Tensor) -> Figures:
    dist.all_reduce(gradient)
    # Stands for the optimizer, which the host queues without waiting for the collective.
    weight.add_(gradient)
    written = torch.cuda.Event()
    written.record()
    time.sleep(_HUNG_S)
    hung = not written.query()
    began_s = time.monotonic()
    calls = abort(all_groups(), rank.device)
    synchronize = BackgroundCall(torch.cuda.synchronize, rank.device).start()
    freed = synchronize.wait(_FREED_LIMIT_S)
    freed_s = time.monotonic() - began_s
    next_error, values = "", []
    if freed:
        wait_all(calls, _FREED_LIMIT_S)
        following = BackgroundCall(lambda: dist.all_reduce(gradient), rank.device).start()
        following.wait(_FREED_LIMIT_S)
        next_error = described(following.error)
        values = [str(value) for value in weight.unique()[:5].tolist()]
    return {
        "hung": hung,
        "freed": freed,
        "freed_s": round(freed_s, 2),
        "error": described(synchronize.error),
        "queued_ran": freed and written.query(),
        "values": values,
        "next_error": next_error,
    }
