"""Trains under keepstep on the queued device, which itself records what it has computed.

The argument is a JSON object of options: `log`, a directory; `fence`, whether keepstep fences
before it aborts (True). The loop goes on until a file `finish` is there. A file `KIND-RANK` makes
that rank, at the next step, do what `faults.py` says; the rank removes the file.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import keepstep
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.elastic.trainer import job_options
from keepstep.elastic.trainer.generation_state import GenerationState
from keepstep.elastic.trainer.job import Job
from keepstep.elastic.trainer.process_groups import ProcessGroups, World
from keepstep.elastic.worker.messages import Assignment, Joined
from keepstep.elastic.worker.session import Session, current
from tests.queued_device.module import to_device
from tests.queued_device.process_group import BACK_END, QueuedProcessGroup, register
from tests.queued_device.queue import DEVICE
from tests.queued_device.tensor import QueuedTensor, on_host

options = json.loads(sys.argv[1])
log = Path(options["log"])
register(log / "aborts")


def is_due(kind: str, rank: int) -> bool:
    """Whether this rank is to fail now; once for each file."""
    try:
        (log / f"{kind}-{rank}").unlink()
    except FileNotFoundError:
        return False
    return True


def write(line: Mapping[str, Any], rank: int) -> None:
    with (log / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({**line, "rank": rank, "at_s": time.time()}) + "\n")


enter, finish, seal = ProcessGroups.enter, ProcessGroups.finish, SnapshotClient.seal


def enter_unless_faulty(
    self: ProcessGroups, assignment: Assignment, mesh: Mapping[str, int]
) -> World:
    if is_due("entry", assignment.rank):
        os._exit(1)
    return enter(self, assignment, mesh)


def finish_device(self: ProcessGroups) -> None:
    """Wait for the queue, of which `torch.cuda.synchronize` knows nothing."""
    DEVICE.synchronize()
    finish(self)


def seal_and_tell(
    self: SnapshotClient, snapshot: Any, rank: int, index_offset: int, *rest: Any, **named: Any
) -> None:
    """Record a snapshot that was sealed although it holds garbage."""
    seal(self, snapshot, rank, index_offset, *rest, **named)
    for arena in self._arenas.values():
        words = arena.bytes[: index_offset // 4 * 4].view(np.uint32)
        # By its bits, for not everything there is a floating-point number.
        if (words == np.float32("nan").view(np.uint32)).any():
            write({"sealed_garbage": snapshot.step, "generation": snapshot.generation}, rank)
            return


ProcessGroups.enter = enter_unless_faulty  # type: ignore[method-assign]
ProcessGroups.finish = finish_device  # type: ignore[method-assign]
SnapshotClient.seal = seal_and_tell  # type: ignore[method-assign]
if not options.get("fence", True):
    # Each rank aborts as soon as it learns that the generation is over, and seals what it has.
    on_abort = Session.on_abort
    Session.on_abort = lambda self, abort, *, awaits_order: on_abort(  # type: ignore[method-assign]
        self, abort, awaits_order=False
    )
    Session.wait_for_abort_order = lambda *_: None  # type: ignore[method-assign, assignment]
    GenerationState._may_seal = lambda *_: True  # type: ignore[method-assign, assignment]
    job_options.Joined = lambda **fields: Joined(  # type: ignore[misc, assignment]
        **{**fields, "awaits_abort_order": False}
    )


def build(world: keepstep.World) -> keepstep.State:
    if is_due("build", world.rank):
        (log / f"building-{world.rank}").touch()
        while not current().is_closing(world.generation):
            time.sleep(0.005)
        # What a call of torch.distributed raises in another thread than the one that aborts.
        raise ValueError("Default process group has not been initialized")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
    to_device(model)
    return keepstep.State(model, functools.partial(torch.optim.AdamW, lr=1e-2))


def will_be_snapshotted(job: Job) -> bool:
    """Whether the ranks have agreed on a snapshot of the step under way."""
    snapshots = job._state.snapshots
    snapshots._receive_result()
    votes = snapshots._agreement.result
    return votes is not None and votes.is_wanted and votes.may_begin


def record(step: int, world: keepstep.World, loss: torch.Tensor) -> None:
    """Record a step that the device has computed; runs on the device."""
    value = float(on_host(loss))
    line = {"step": step, "generation": world.generation, "loss": value.hex()}
    write({**line, "is_garbage": value != value}, world.rank)


data = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
with keepstep.join(build, backend=BACK_END) as job:
    is_finished = torch.zeros((), dtype=torch.int64)
    for batch in job.batches(data, global_batch=8, epochs=10**6):
        with job.step():
            world, number = job.world, job.steps + 1
            if is_due("hang", world.rank):
                threading.Event().wait()
            if is_due("slow", world.rank):
                DEVICE.enqueue(lambda: time.sleep(0.5))
            inputs = QueuedTensor(batch)
            target = inputs.sum(1, keepdim=True).tanh()
            loss = (job.model(inputs) - target).square().sum() / 8
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
            if will_be_snapshotted(job) and is_due("lost", world.rank):
                group = dist.group.WORLD
                assert isinstance(group, QueuedProcessGroup)
                group.lose_result(job.model[0].weight.grad)
                group.lose_result(total)
            job.optimizer.step()
            DEVICE.enqueue(functools.partial(record, number, world, total))
            is_finished.fill_((log / "finish").exists())
            dist.all_reduce(is_finished, dist.ReduceOp.MIN)
        if is_finished:
            break
        # Long enough for each step's snapshot to be committed before the next one.
        time.sleep(0.03)
