"""Runs one worker of data.py's job: a pass over each kind of source, with a loss of its own.

`data_worker.py OPTIONS`, a JSON object: `log`, `shards`, `kinds`, `steps` per pass, `global_batch`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep
from ops.bench.data_kinds import as_list, losses_of, mode_of, name_of, source, tokens_of

OPTIONS = json.loads(sys.argv[1])
LOG = Path(OPTIONS["log"])


def build(world: keepstep.World) -> keepstep.State:
    linear = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(linear.weight, 0.5)
    model = DistributedDataParallel(linear)
    return keepstep.State(model, lambda parameters: torch.optim.SGD(parameters, lr=0.05))


def backward(job: keepstep.Job, step: keepstep.Step, mode: str, batch: Any) -> list[Any]:
    """Compute the gradient of the mean over the global batch; return the samples."""
    if mode == "micro_batches":
        samples = []
        for micro_batch, loss_scale, _ in batch:
            (losses_of(job.model, micro_batch).mean() * loss_scale).backward()
            # One that only fills up the number of micro-batches has no weight.
            samples += micro_batch if loss_scale else []
        return samples
    losses = losses_of(job.model, batch)
    if mode == "tokens":
        tokens = tokens_of(batch)
        ((losses * tokens).sum() * step.mean_over(int(tokens.sum()))).backward()
    else:
        (losses.mean() * step.loss_scale).backward()
    return list(batch)


def main() -> None:
    with keepstep.join(
        build,
        seed=OPTIONS["seed"],
        device="cpu",
        checkpoint=OPTIONS["checkpoint"],
        checkpoint_every=4,
    ) as job:
        for number, kind in enumerate(OPTIONS["kinds"]):
            mode = mode_of(number)
            for batch in job.batches(
                source(kind, Path(OPTIONS["shards"])),
                OPTIONS["global_batch"],
                micro_batch=1 if mode == "micro_batches" else None,
                steps=OPTIONS["steps"],
                collate=as_list,
                # torchdata's loader has processes of its own.
                workers=OPTIONS["workers"] if kind != "loader" else 0,
                loader_options={"prefetch_factor": 3, "persistent_workers": True}
                if kind != "loader"
                else None,
            ):
                with job.step() as step:
                    samples = backward(job, step, mode, batch)
                    weight = next(job.model.parameters())
                    assert weight.grad is not None
                    # Inside the step, so that the line is written before the step is committed.
                    line = {
                        "step": job.steps + 1, "rank": job.world.rank,
                        "generation": job.world.generation, "world_size": job.world.world_size,
                        "pid": os.getpid(),
                        "samples": [name_of(sample) for sample in samples],
                        "weight": weight.detach()[0].tolist(), "gradient": weight.grad[0].tolist(),
                    }  # fmt: skip
                    job.optimizer.step()
                    with (LOG / f"rank-{job.world.rank}.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
                # A kill must find the pass that it is meant for.
                time.sleep(OPTIONS["pause_s"])


if __name__ == "__main__":
    main()
