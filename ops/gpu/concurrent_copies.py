"""N5: all GPUs copy to the host, one alone and then all at once, from memory near each of them.

Says what the snapshots of a whole node take, which one GPU cannot tell: the links to the host are
shared. Each process runs on the processors of its GPU's NUMA node, so that the pages that it
touches lie there. Passes if the bytes of all copies are equal; the speeds are figures.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ops.gpu.check import Figures, Finding
from ops.gpu.environment import on_own_gpu
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank, figures_of, run_ranks
from ops.gpu.shared_memory import SharedMemory, affordable_nbytes, pieces, registered

_NBYTES = 4 << 30
_COPIES = 3


def check(machine: Machine) -> Finding:
    """Copy on all GPUs."""
    world_size = len(machine.gpus)
    ranks = figures_of(
        run_ranks(
            copy,
            world_size,
            limit_s=50,
            devices=range(world_size),
            environment=on_own_gpu,
            options={"nbytes": _NBYTES},
        )
    )
    return Finding(
        {"the bytes of all copies are equal": all(found["equal"] for found in ranks)},
        {f"rank {number}": found for number, found in enumerate(ranks)},
    )


def copy(rank: Rank) -> Figures:
    """Copy alone while the others wait, each in turn, and then together."""
    node = _numa_node(rank.device)
    _bind_to(node)
    torch.cuda.set_device(rank.device)
    store = rank.store()
    nbytes = affordable_nbytes(rank.options["nbytes"], processes=rank.world_size)
    source = torch.full((nbytes,), rank.rank + 1, dtype=torch.uint8, device="cuda")
    with SharedMemory(source.nbytes) as memory:
        memory.touch()
        parts = pieces(memory.nbytes)
        with registered(memory, parts) as code:
            if code:
                raise RuntimeError(f"cudaHostRegister: {code}")
            alone = 0.0
            for turn in range(rank.world_size):
                rank.meet(store, f"turn {turn}")
                if turn == rank.rank:
                    alone = _gigabytes_per_s(source, memory.tensor, parts)
            rank.meet(store, "together")
            together = _gigabytes_per_s(source, memory.tensor, parts)
            rank.meet(store, "copied")
            equal = bool((memory.tensor == rank.rank + 1).all().item())
    return {
        "numa_node": node,
        "nbytes": source.nbytes,
        "alone_gigabytes_per_s": alone,
        "together_gigabytes_per_s": together,
        "equal": equal,
    }


def _gigabytes_per_s(
    source: torch.Tensor, target: torch.Tensor, parts: list[tuple[int, int]]
) -> float:
    torch.cuda.synchronize()
    began_s = time.monotonic()
    for _ in range(_COPIES):
        for offset, nbytes in parts:
            span = slice(offset, offset + nbytes)
            target[span].copy_(source[span], non_blocking=True)
    torch.cuda.synchronize()
    return round(_COPIES * source.nbytes / 1e9 / (time.monotonic() - began_s), 1)


def _numa_node(device: int) -> int:
    """Return the NUMA node of a GPU; -1 if the machine does not say."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (
        getattr(properties, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    path = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node")
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _bind_to(node: int) -> None:
    """Run on the processors of a NUMA node from now on, as far as this process may."""
    try:
        text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return
    processors: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        processors.update(range(int(first), int(last or first) + 1))
    if allowed := processors & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)
