"""Enters and leaves process groups as a recovery in place does.

Groups are aborted all at once, a thread for each with its device set: aborting one may synchronize
the device, and would wait for the kernels of another that nobody has aborted yet.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroup
from torch.distributed.distributed_c10d import _world

from keepstep.elastic.trainer.back_ends import list_ranks
from ops.gpu.background import BackgroundCall
from ops.gpu.ranks import Rank

ABORT_DEADLINE_S = 15.0
# The check's runner decides which rank hangs, not the watchdog.
_NO_TIMEOUT = timedelta(hours=24)


def enter(
    rank: Rank,
    *,
    generation: int = 0,
    timeout: timedelta = _NO_TIMEOUT,
    world_size: int | None = None,
) -> ProcessGroup:
    """Bind this process to the rank's GPU and return the default group of a generation."""
    torch.cuda.set_device(rank.device)
    dist.init_process_group(
        "nccl",
        store=PrefixStore(f"generation-{generation}", rank.store(generation)),
        rank=rank.rank,
        world_size=rank.world_size if world_size is None else world_size,
        timeout=timeout,
        device_id=torch.device("cuda", rank.device),
    )
    group = dist.group.WORLD
    assert group is not None
    list_ranks(group)
    return group


def all_groups() -> list[ProcessGroup]:
    """Return all groups of this process, the default one included."""
    return list(_world.pg_names)


def abort(groups: Iterable[ProcessGroup], device: int) -> list[BackgroundCall]:
    """Begin to abort groups, all at once; return the calls."""
    back_ends = [group._get_backend(torch.device("cuda")) for group in groups]
    return [BackgroundCall(back_end.abort, device).start() for back_end in back_ends]


def wait_all(calls: Iterable[BackgroundCall], timeout_s: float) -> bool:
    """Wait for calls together; return whether all have ended."""
    deadline_s = time.monotonic() + timeout_s
    return all(call.wait(max(0.0, deadline_s - time.monotonic())) for call in calls)


def leave(device: int) -> None:
    """Abort all groups, destroy them, and return the device's memory.

    Raises:
        TimeoutError: an abort did not return.
    """
    if not wait_all(abort(all_groups(), device), ABORT_DEADLINE_S):
        raise TimeoutError(f"an abort has not returned within {ABORT_DEADLINE_S:.0f} s")
    dist.destroy_process_group()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def all_gather(
    group: ProcessGroup, output: torch.Tensor, source: torch.Tensor, *, asynchronous: bool = False
) -> Any:
    """Gather tensors of equal size; return what the back end returns: a Work, or None.

    The functions of torch.distributed return None for synchronous calls in any case, and have other
    names in other versions.
    """
    options = AllgatherOptions()
    options.asyncOp = asynchronous
    return group._allgather_base(output, source, options)
