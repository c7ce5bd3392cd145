"""Accumulates scaled gradients over micro-batches, and clips them, with FSDP2.

`keepstep run --nproc-per-node 2 examples/accumulation.py --steps 200`

One list of micro-batches of `job.batches` is one optimizer step. The scale of the GradScaler is
part of the state, so a run that recovers scales as an undisturbed one. `build` makes a new scaler,
since an old one remembers parts of a step under way that belong to the optimizer of its generation.
"""

from __future__ import annotations

import functools

import click
import torch
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import keepstep


@click.command()
@click.option("--steps", default=100)
@click.option("--global-batch", default=16)
@click.option("--micro-batch", default=4, help="Greatest number of samples at a time on a rank.")
@click.option("--width", default=64)
@click.option("--clip", default=1.0, help="Greatest norm of the gradient.")
def main(steps: int, global_batch: int, micro_batch: int, width: int, clip: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler: torch.amp.GradScaler

    def build(world: keepstep.World) -> keepstep.State:
        nonlocal scaler
        scaler = torch.amp.GradScaler(device, growth_interval=50)
        with torch.device("meta"):
            model = GPT(GPTConfig(width=width, layers=2, context=64))
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh["dp"])
        fully_shard(model, mesh=world.mesh["dp"])
        return keepstep.State(
            model,
            functools.partial(AdamW, lr=1e-3),
            initialize=initialize,
            extra={"scaler": scaler},
        )

    with keepstep.join(build) as job:
        windows = Windows(standard_library(), 64)
        # As few micro-batches as fit, the same number on all ranks, and none of them is empty.
        for micro_batches in job.batches(
            windows, global_batch, micro_batch=micro_batch, steps=steps
        ):
            with job.step() as step:
                loss = torch.zeros((), device=job.world.device)
                for batch, loss_scale, is_last in micro_batches:
                    job.model.set_requires_gradient_sync(is_last)
                    with torch.autocast(device, dtype=torch.float16):
                        part = job.model(batch) * loss_scale
                    scaler.scale(part).backward()
                    loss += part.detach()
                scaler.unscale_(job.optimizer)
                norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), clip)
                # It skips the step if the scale was too great.
                scaler.step(job.optimizer)
                scaler.update()
            if step.completed and job.world.rank == 0 and job.steps % 10 == 0:
                shown = f"norm {norm.item():.3g}  scale {scaler.get_scale():g}"
                print(f"step {job.steps}  loss {loss.item():.4f}  {shown}", flush=True)


if __name__ == "__main__":
    main()
