"""Lists the ranks of a default process group in its back ends, which PyTorch leaves out.

PyTorch takes the first group of NCCL, and of gloo, that a process has for one of all ranks, and
reads the ranks of every later one from its options (`groupRanks`; pytorch #192109 and #192106, of
August 2026). For default groups that list is empty: in a process that has had one before, splitting
its successor ends the process (SIGSEGV), and so does a mesh of several dimensions, which is made by
splitting. Seen with PyTorch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def list_ranks(group: dist.ProcessGroup) -> None:
    """Give the back ends of a default group the list of its ranks."""
    known: tuple[Any, ...] = (dist.ProcessGroupGloo,)
    if dist.is_nccl_available():
        known += (distributed_c10d.ProcessGroupNCCL,)
    for device in group._device_types:
        back_end = unwrapped(group._get_backend(device))
        if isinstance(back_end, known):
            back_end.options.global_ranks_in_group = list(range(group.size()))


def unwrapped(back_end: Any) -> Any:
    """Return the back end that one for debugging wraps (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    wrapper = distributed_c10d._ProcessGroupWrapper  # type: ignore[attr-defined]
    while isinstance(back_end, wrapper):
        back_end = back_end.wrapped_pg
    return back_end
