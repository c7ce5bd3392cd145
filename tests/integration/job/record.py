"""A training script that writes down, for every step and rank, which samples it saw and the exact loss."""

import functools
import json
import sys
import zlib
from pathlib import Path

import torch
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import elastic

options = json.loads(sys.argv[1])
log = Path(options["log"])
config = GPTConfig(width=32, layers=2, context=32, heads=2, dropout=options.get("dropout", 0.0))


def build(world: elastic.World) -> elastic.State:
    with torch.device("meta"):
        model = GPT(config)
    for block in model.blocks:
        if "tp" in options.get("mesh", ()):
            parallelize_module(block, world.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=world.mesh["dp"])
    return elastic.State(
        fully_shard(model, mesh=world.mesh["dp"]),
        functools.partial(AdamW, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20),
        initialize=initialize,
    )


assert not [name for name in sys.modules if name.startswith(("etcd3", "google.protobuf"))]
with elastic.join(
    build, checkpoint=options.get("checkpoint"), checkpoint_every=options.get("every"), mesh=options.get("mesh")
) as job:
    for batch in job.batches(Windows(standard_library(), 32), global_batch=8, steps=options["steps"]):
        with job.step() as step:
            loss = job.model(batch) * step.loss_scale
            loss.backward()
            job.optimizer.step()
            job.scheduler.step()
        if step.completed:
            world = job.world
            line = {
                "step": job.steps,
                "rank": world.rank,
                "world_size": world.world_size,
                "generation": world.generation,
                "loss": loss.item().hex(),
                "samples": [zlib.crc32(sample.numpy().tobytes()) for sample in batch[0]],
            }
            with (log / f"rank-{world.rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
