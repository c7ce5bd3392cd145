"""Trains a tiny model, and hangs or pauses as the command line says; see standstill.py.

`keepstep run ... standstill_worker.py LOG KIND WHEN STEPS`. KIND is one of `HANGS`, which rank 1
does in step `HANGS_AT` in the first generation (WHEN `once`) or in each (`always`); or one of
`HABITS`, which are healthy. LOG gets a line with the time of the hang, and of each step of rank 0.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

HANGS_AT = 20
HABIT_EVERY = 25
_FOREVER_S = 10**6


def wait_for_lock() -> None:
    """Deadlock on a lock of this process."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loop() -> NoReturn:
    """Compute without end."""
    while True:
        pass


def wait_for_network() -> None:
    """Wait for a peer that sends nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        connection.recv(1)


def call_another_collective() -> None:
    """Call what the other ranks do not call."""
    import torch.distributed as dist

    dist.barrier()


HANGS: Mapping[str, Callable[[], object]] = {
    "different collectives": call_another_collective,
    "loader": lambda: None,
    "lock": wait_for_lock,
    "sleep": lambda: time.sleep(_FOREVER_S),
    "stopped process": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    # Holds the interpreter's lock, so that no thread of the process answers anybody.
    "native call": lambda: ctypes.PyDLL(None).sleep(_FOREVER_S),
    "infinite loop": loop,
    "network wait": wait_for_network,
}
HABITS = ("irregular steps", "evaluation of one rank", "evaluation of all", "checkpoint", "data")


def main() -> None:
    """Train; see the module."""
    import torch
    import torch.distributed as dist

    import keepstep

    log, kind, when, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    jitter = random.Random(0)

    def note(event: str) -> None:
        with open(log, "a") as file:
            file.write(f"{time.time():.3f} {event}\n")

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        job: keepstep.Job | None = None

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> torch.Tensor:
            job = self.job
            if job is not None and kind == "loader" and is_to_hang(job):
                note("hangs")
                time.sleep(_FOREVER_S)
            if job is not None and kind == "data" and job.steps % HABIT_EVERY == HABIT_EVERY - 1:
                time.sleep(pause_s / 2)
            return torch.randn(4)

    def is_to_hang(job: keepstep.Job) -> bool:
        is_time = job.steps == HANGS_AT and job.world.rank == 1
        return is_time and (when == "always" or job.world.generation == 1)

    def build(world: keepstep.World) -> keepstep.State:
        return keepstep.State(torch.nn.Linear(4, 4), functools.partial(torch.optim.SGD, lr=0.1))

    data, pause_s = Data(), float(os.environ.get("STANDSTILL_PAUSE_S", "30"))
    with keepstep.join(build) as job:
        data.job = job
        for batch in job.batches(data, global_batch=4):
            is_pause = job.steps % HABIT_EVERY == HABIT_EVERY - 1
            with job.step() as step:
                if kind in HANGS and kind != "loader" and is_to_hang(job):
                    note("hangs")
                    HANGS[kind]()
                if kind == "irregular steps":
                    time.sleep(jitter.expovariate(2.0) + (pause_s if is_pause else 0.0))
                job.model(batch).square().mean().backward()
                for parameter in job.model.parameters():
                    dist.all_reduce(parameter.grad)
                job.optimizer.step()
                time.sleep(0.05)
            if step.completed and job.world.rank == 0:
                note(f"step {job.steps}")
            alone = kind in ("evaluation of one rank", "checkpoint") and job.world.rank == 0
            if is_pause and (alone or kind == "evaluation of all"):
                time.sleep(pause_s)
            if job.steps >= steps:
                break


if __name__ == "__main__":
    main()
