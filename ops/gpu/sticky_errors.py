"""G9: an error that ruins the CUDA context; the process's abilities and memory afterwards.

Proves that such a worker has to be replaced, and that its shared memory is not lost with it. Passes
if the error is `torch.AcceleratorError`, every later CUDA call and a new process group fail, the
process lives on for 3 s with a group's watchdog and ends with the status it chose, and the memory
that it had copied to is whole.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ops.gpu.background import BackgroundCall, described
from ops.gpu.check import Figures, Finding
from ops.gpu.groups import abort, all_groups, enter, wait_all
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks
from ops.gpu.shared_memory import SharedMemory, register

_NBYTES = 64 << 20
_PATTERN = 171
_WATCHDOG_S = 3.0
_DEADLINE_S = 8.0


def check(machine: Machine) -> Finding:
    """Break a process's context; look at the memory from this process, which uses no GPU."""
    with SharedMemory(_NBYTES) as memory:
        results = run_ranks(
            break_context, 1, limit_s=50, generations=2, options={"path": memory.path}
        )
        (found,) = figures_of(results)
        whole = bool((memory.tensor == _PATTERN).all().item())
    return Finding(
        {
            "the error is torch.AcceleratorError": found["error"].startswith("AcceleratorError"),
            "further CUDA calls fail": bool(found["next_error"]),
            "a new process group cannot be used": not found["rebuilt"],
            "the process lives with the watchdog, and ends as it chooses": results[0].status == 0,
            "what it had copied to shared memory is whole": whole,
        },
        found,
    )


def break_context(rank: Rank) -> Figures:
    """Copy to shared memory, index out of bounds, and try to go on."""
    enter(rank)
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    memory = SharedMemory(_NBYTES, rank.options["path"])
    code = register(memory.address, memory.nbytes)
    source = torch.full((_NBYTES,), _PATTERN, dtype=torch.uint8, device="cuda")
    memory.tensor.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    error = _error_of_out_of_bounds(value)
    next_error = BackgroundCall(lambda: torch.ones(1, device="cuda"), rank.device).start()
    next_error.wait(_DEADLINE_S)
    time.sleep(_WATCHDOG_S)
    aborted = wait_all(abort(all_groups(), rank.device), _DEADLINE_S)
    rebuild = BackgroundCall(lambda: _rebuild(rank), None).start()
    ended = rebuild.wait(_DEADLINE_S)
    return {
        "register_code": code,
        "error": error,
        "next_error": described(next_error.error),
        "aborted": aborted,
        "rebuilt": ended and rebuild.error is None,
        "rebuild_error": described(rebuild.error) if ended else "does not return",
    }


def _error_of_out_of_bounds(value: torch.Tensor) -> str:
    try:
        value[torch.tensor([9], device="cuda")].sum()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return described(error)
    return ""


def _rebuild(rank: Rank) -> None:
    dist.destroy_process_group()
    enter(rank, generation=1)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
