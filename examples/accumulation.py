"""Accumulates scaled gradients over micro-batches, and clips them, with FSDP2.

`keepstep run --nproc-per-node 2 examples/accumulation.py --steps 200`

One batch of `job.batches` is one optimizer step; it is split inside. The scale of the GradScaler is
part of the state, so a run that recovers scales as one that nothing disturbed.
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
@click.option("--micro-batches", default=2)
@click.option("--width", default=64)
@click.option("--clip", default=1.0, help="Greatest norm of the gradient.")
def main(steps: int, global_batch: int, micro_batches: int, width: int, clip: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = torch.amp.GradScaler(device, growth_interval=50)

    def build(world: keepstep.World) -> keepstep.State:
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
        for batch in job.batches(Windows(standard_library(), 64), global_batch, steps=steps):
            with job.step() as step:
                loss = torch.zeros((), device=job.world.device)
                # Ranks may have shares of different sizes, but run as many micro-batches.
                chunks = zip(*(part.tensor_split(micro_batches) for part in batch), strict=True)
                for number, chunk in enumerate(chunks, 1):
                    job.model.set_requires_gradient_sync(number == micro_batches)
                    weight = len(chunk[0]) / len(batch[0]) * step.loss_scale
                    with torch.autocast(device, dtype=torch.float16):
                        part = job.model(chunk) * weight
                    scaler.scale(part).backward()
                    loss += part.detach()
                scaler.unscale_(job.optimizer)
                norm = torch.nn.utils.clip_grad_norm_(job.model.parameters(), clip)
                # It leaves the step out where the scale was too great.
                scaler.step(job.optimizer)
                scaler.update()
            if step.completed and job.world.rank == 0 and job.steps % 10 == 0:
                shown = f"norm {norm.item():.3g}  scale {scaler.get_scale():g}"
                print(f"step {job.steps}  loss {loss.item():.4f}  {shown}", flush=True)


if __name__ == "__main__":
    main()
