"""Starts the ranks of a test, from a process that has loaded PyTorch already.

Loading PyTorch takes two seconds of processor time, for each new rank of a test.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload([
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "keepstep.checkpoint.api",
])  # fmt: skip


def run_ranks(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(rank, *args)` in so many processes; raise if it raises in one of them."""
    arguments = (function, dict(os.environ), args)
    mp.start_processes(_run_rank, args=arguments, nprocs=nprocs, start_method="forkserver")


def process_of(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Return a process, not yet started, that will call a function."""
    context = multiprocessing.get_context("forkserver")
    return context.Process(target=_run, args=(function, dict(os.environ), args))


def _run_rank(
    rank: int, function: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]
) -> None:
    _run(function, environment, (rank, *args))


def _run(function: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]) -> None:
    # The process that ranks are forked from has the environment of when it was started.
    os.environ.clear()
    os.environ.update(environment)
    function(*args)


def act_in_groups(rank: int, root: str, *phases: tuple[int, Callable[[], None]]) -> None:
    """Act in one process group of gloo after the other, then end this process.

    Args:
        rank: this process's rank in each group that it is in.
        root: a directory for the groups' stores.
        phases: the size of each group, and what its ranks do.
    """
    torch.set_num_threads(1)
    for number, (world, act) in enumerate(phases):
        if rank < world:
            store = dist.FileStore(f"{root}/group-{number}", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            act()
            dist.barrier()
            dist.destroy_process_group()
    # Models still refer to gloo's groups, whose threads may abort an interpreter that exits
    # normally.
    os._exit(0)
