"""A training script with bad samples, whose steps are rejected; or one that skips their batches."""

import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage

options = json.loads(sys.argv[1])
log = Path(options["log"])
NOT_A_NUMBER, HUGE, BATCH = 3, 12, 4
"""Global batches with a bad sample: one of rank 1's, one of rank 0's."""


def build(world: keepstep.World) -> keepstep.State:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    return keepstep.State(
        DistributedDataParallel(model, find_unused_parameters=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=15),
    )


class Points:
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        point = torch.sin(torch.arange(8.0) * (index + 1))
        if index == NOT_A_NUMBER * BATCH + BATCH - 1:
            return point * torch.nan
        return point * 1000 if index == HUGE * BATCH else point


def write(name: str, line: object) -> None:
    with (log / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def die_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def rejections(rejected: keepstep.RejectedStep) -> None:
    # A process that replaces one gets it while it joins: there is no `job` yet.
    rank = int(os.environ["RANK"])
    write("rejections.jsonl", [rank, rejected.step, rejected.rank, list(rejected.batches)])


with keepstep.join(
    build,
    checkpoint=options.get("checkpoint"),
    checkpoint_every=2 if "checkpoint" in options else None,
    on_bad_step=keepstep.BadSteps(
        at_most=options.get("at_most", 2),
        spike=1000.0,
        window=4,
        roll_back=options.get("roll_back", 2),
    ),
    callbacks=keepstep.Callbacks(on_rejected_step=rejections),
) as job:
    skipped = options.get("skipped", [])
    for number, points in enumerate(
        job.batches(Points(), global_batch=BATCH, steps=options["batches"], shuffle=False)
    ):
        if "skipped" in options and number in skipped:
            continue
        if "checkpoint" in options:
            # What is resumed from is then the same each time.
            wait_for(lambda: job._session.is_committed(job.steps) or not job.steps)
            wait_for(
                lambda: (
                    job.steps != HUGE - 3 or bool(list_steps(open_storage(options["checkpoint"])))
                )
            )
        with job.step() as step:
            loss = (job.model(points).squeeze(1) - points.sum(1)).square().mean()
            step.report(loss=loss.detach())
            loss.backward()
            if options.get("dies") and job.world.rank == 1 and job.steps == 15:
                die_once(log / "died")
            job.optimizer.step()
            job.scheduler.step()
            if options.get("node_dies") and job.world.rank == 1 and job.steps == 8:
                os.kill(os.getppid(), signal.SIGKILL)
            line = {"step": job.steps + 1, "loss": loss.item().hex(), "drawn": torch.rand(1).item()}
            line["samples"] = [zlib.crc32(point.numpy().tobytes()) for point in points]
            write(f"steps-{job.world.rank}.jsonl", line | {"generation": job.world.generation})
    wait_for(lambda: job.world.generation == 1 or (log / "release").exists())
