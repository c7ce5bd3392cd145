"""A training script whose tracker's record has each step once; rank 0 dies at given steps."""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch
from tracker import CsvRecord, Tracker

import keepstep

directory = Path(sys.argv[1])
tracker = Tracker(CsvRecord(directory / "run.csv"))


def build(world: keepstep.World) -> keepstep.State:
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return keepstep.State(model, optimizer, extra={"tracker": tracker})


callbacks = keepstep.Callbacks(on_generation=tracker.on_generation, on_snapshot=tracker.on_snapshot)
with keepstep.join(build, callbacks=callbacks) as job:
    for batch in job.batches(torch.eye(4).repeat(40, 1), 4, epochs=1):
        with job.step() as step:
            loss = job.model(batch).square().mean()
            loss.backward()
            job.optimizer.step()
            mean = loss.detach() / job.world.world_size
            torch.distributed.all_reduce(mean)
            tracker.write(job.steps + 1, loss=float(mean))
            # After the last collective, where a step is most often computed again.
            time.sleep(0.02)
            del loss
        died = directory / f"died-{job.steps}"
        if job.steps in (9, 21) and job.world.rank == 0 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
tracker.finish()
