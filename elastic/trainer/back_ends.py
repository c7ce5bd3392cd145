"""Knows the back ends of process groups that keepstep rebuilds, NCCL's and gloo's.

PyTorch takes the first group of NCCL, and of gloo, that a process has for one of all ranks, and
reads the ranks of every later one from its options (`groupRanks`; pytorch #192109 and #192106, of
August 2026). For default groups that list is empty: in a process that has had one before, splitting
its successor ends the process (SIGSEGV), and a mesh of several dimensions is made by splitting on
GPUs. Seen with PyTorch 2.11 and 2.13. The checks for GPUs use this module, too: it imports PyTorch
only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def known_back_end(group: dist.ProcessGroup, device: torch.device) -> Any | None:
    """Return a group's back end on a device; None if it is neither NCCL's nor gloo's."""
    back_end: Any = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
    wrapper = distributed_c10d._ProcessGroupWrapper  # type: ignore[attr-defined]
    while isinstance(back_end, wrapper):
        back_end = back_end.wrapped_pg
    if isinstance(back_end, dist.ProcessGroupGloo):
        return back_end
    if dist.is_nccl_available() and isinstance(back_end, distributed_c10d.ProcessGroupNCCL):
        return back_end
    return None


def list_ranks(group: dist.ProcessGroup) -> None:
    """Give the back ends of a default group the list of its ranks, which PyTorch leaves out."""
    for device in group._device_types:
        back_end = known_back_end(group, device)
        if back_end is not None:
            back_end.options.global_ranks_in_group = list(range(group.size()))
