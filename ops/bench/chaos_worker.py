"""Trains for chaos.py, and records samples and exact loss of every step and rank.

`chaos_worker.py OPTIONS`, with OPTIONS in JSON: `log`, a folder for the records; `steps`;
`pace_s`, how long a step takes at least; `dropout`; `checkpoint` and `every`, as for
`keepstep.join`. It computes with 64 bits, so that a sum in another order changes a loss by far less
than a lost sample does.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import keepstep

GLOBAL_BATCH = 12
options = json.loads(sys.argv[1])
log = Path(options["log"])
config = GPTConfig(width=32, layers=2, context=32, heads=2, dropout=options["dropout"])
torch.set_default_dtype(torch.float64)
entered_ns = 0


def build(world: keepstep.World) -> keepstep.State:
    # Names this entry into a generation, the same on all ranks. Generations may begin again at 1.
    global entered_ns
    entered = torch.tensor([time.monotonic_ns()])
    dist.broadcast(entered, src=0)
    entered_ns = int(entered.item())
    with torch.device("meta"):
        model = GPT(config)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh["dp"])
    fully_shard(model, mesh=world.mesh["dp"])
    return keepstep.State(
        model, functools.partial(AdamW, lr=1e-3, fused=True), initialize=initialize
    )


with keepstep.join(
    build, checkpoint=options.get("checkpoint"), checkpoint_every=options.get("every")
) as job:
    for batch in job.batches(
        Windows(standard_library(), 32), global_batch=GLOBAL_BATCH, steps=options["steps"]
    ):
        begun_s = time.monotonic()
        with job.step() as step:
            loss = job.model(batch) * step.loss_scale
            loss.backward()
            job.optimizer.step()
            time.sleep(max(0.0, begun_s + options["pace_s"] - time.monotonic()))
            # Inside the step, so that the line is written before the step can be committed. A step
            # that fails at its end is computed and recorded again.
            line = {
                "step": job.steps + 1,
                "rank": job.world.rank,
                "world_size": job.world.world_size,
                "generation": job.world.generation,
                "entered_ns": entered_ns,
                "at_s": time.monotonic(),
                "pid": os.getpid(),
                "loss": loss.item().hex(),
                "samples": [zlib.crc32(sample.numpy().tobytes()) for sample in batch[0]],
            }
            with (log / f"rank-{job.world.rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
