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

from keepstep.torch_internals import back_end, device_types


def known_back_end(group: dist.ProcessGroup, device: torch.device) -> Any | None:
    """Return a group's back end on a device; None if it is neither NCCL's nor gloo's."""
    known = back_end(group, device)
    if isinstance(known, dist.ProcessGroupGloo):
        return known
    if dist.is_nccl_available() and isinstance(known, distributed_c10d.ProcessGroupNCCL):
        return known
    return None


def list_ranks(group: dist.ProcessGroup) -> None:
    """Give the back ends of a default group the list of its ranks, which PyTorch leaves out."""
    for device in device_types(group):
        known = known_back_end(group, device)
        if known is not None:
            known.options.global_ranks_in_group = list(range(group.size()))
