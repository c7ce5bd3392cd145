"""Two ranks that show what the queued device and its back end do, for `test_queued_device.py`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from tests.adaptive_timeouts import patient
from tests.queued_device.process_group import BACK_END, register
from tests.queued_device.queue import DEVICE
from tests.queued_device.tensor import QueuedTensor, on_host

Shown = Mapping[str, object]


def run(rank: int, directory: Path, port: int, results: Connection) -> None:
    """Run everything as one of the two ranks; rank 1 ends without a word, rank 0 tells."""
    register(directory / "aborts")
    if rank == 1:
        _wait_for(directory / "constructor waits")
    began = threading.Thread(target=_enter, args=(rank, port))
    began.start()
    shown: dict[str, object] = {}
    if rank == 0:
        began.join(0.3)
        shown["constructor waits"] = began.is_alive()
        (directory / "constructor waits").touch()
    began.join()
    shown |= _show_order(rank, directory)
    shown |= _show_garbage_of_a_peer(rank, directory)
    if rank == 1:
        os._exit(0)
    shown |= _show_lost_peer()
    results.send(shown)
    os._exit(0)


def _enter(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(BACK_END, store=store, rank=rank, world_size=2)


def _show_order(rank: int, directory: Path) -> Shown:
    """Show that a collective returns before the peer has come, and that the rest waits for it."""
    value = QueuedTensor(torch.full((4,), rank + 1.0))
    if rank == 1:
        _wait_for(directory / "returned")
    work = dist.all_reduce(value)
    doubled = value * 2
    ahead = DEVICE.length
    (directory / "returned").touch()
    on_the_host = torch.ones(1)
    dist.all_reduce(on_the_host)
    return {
        "work": work,
        "operations ahead": ahead,
        "doubled": doubled.tolist(),
        "on the host": on_the_host.item(),
    }


def _show_garbage_of_a_peer(rank: int, directory: Path) -> Shown:
    """Show that a rank whose peer aborts ends its collective, on garbage, and may then abort."""
    group = dist.new_group(backend=BACK_END)
    value = QueuedTensor(torch.ones(1))
    if rank == 1:
        _wait_for(directory / "in the collective")
        group.abort()
        return {}
    dist.all_reduce(value, group=group)
    (directory / "in the collective").touch()
    doubled = value * 2
    DEVICE.synchronize()
    return {"garbage of a peer": torch.isnan(on_host(doubled)).item()}


def _show_lost_peer() -> Shown:
    """Show what happens at a rank whose peer is gone, before its abort and after it."""
    group = dist.group.WORLD
    assert group is not None
    value = QueuedTensor(torch.ones(1))
    dist.all_reduce(value)
    doubled = value * 2
    settled_s = time.monotonic() + 0.3
    while time.monotonic() < settled_s:
        time.sleep(0.01)
    waiting = DEVICE.length
    aborting = threading.Thread(target=group.abort)
    aborting.start()
    # What waits is let go in the middle of the abort.
    DEVICE.synchronize()
    aborting.join()
    try:
        dist.all_reduce(value)
        raised = ""
    except RuntimeError as error:
        raised = f"{type(error).__name__}: {error}"
    return {
        "operations that wait for the lost peer": waiting,
        "garbage of the abort": torch.isnan(on_host(doubled)).item(),
        "raised after the abort": raised,
    }


def _wait_for(path: Path) -> None:
    until_s = time.monotonic() + patient(60)
    while not path.exists():
        assert time.monotonic() < until_s, f"no {path.name!r}"
        time.sleep(0.005)
