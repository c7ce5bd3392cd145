"""Trains a small GPT with FSDP2, through failures of workers and nodes.

`keepstep run --nproc-per-node 2 examples/train.py --steps 200`
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Protocol

import click
import torch
from gpt import GPT, GPTConfig, initialize  # `gpt` and others are files next to this script.
from metrics import StepFile
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import keepstep


@click.command()
@click.option("--steps", default=100)
@click.option("--global-batch", default=8)
@click.option("--width", default=128)
@click.option("--layers", default=4)
@click.option("--context", default=128)
@click.option("--dropout", default=0.0)
@click.option("--checkpoint", help="URL to store checkpoints under.")
@click.option("--checkpoint-every", type=int)
@click.option("--snapshot-every", default=1)
@click.option("--log", type=Path, help="Append a JSON line per step and rank to this directory.")
@click.option("--metrics", type=Path, help="Write a JSON line per step to this file.")
@click.option("--tensorboard", type=Path, help="Write each step for TensorBoard to this directory.")
@click.option(
    "--pause",
    default=0.0,
    help="Seconds to wait in every step, so that a demonstration can be watched.",
)
def main(
    steps: int, global_batch: int, width: int, layers: int, context: int, dropout: float,
    checkpoint: str | None, checkpoint_every: int | None, snapshot_every: int,
    log: Path | None, metrics: Path | None, tensorboard: Path | None, pause: float,
) -> None:  # fmt: skip
    config = GPTConfig(width=width, layers=layers, context=context, dropout=dropout)

    def build(world: keepstep.World) -> keepstep.State:
        with torch.device("meta"):
            model = GPT(config)
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh["dp"])
        fully_shard(model, mesh=world.mesh["dp"])
        return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)

    writers = step_writers(metrics, tensorboard)

    def on_generation(entered: keepstep.GenerationEntered) -> None:
        for writer in writers:
            writer.on_generation(entered)

    dataset = Windows(standard_library(), context)
    with keepstep.join(
        build,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        snapshot_every=snapshot_every,
        callbacks=keepstep.Callbacks(on_generation=on_generation),
    ) as job:
        for batch in job.batches(dataset, global_batch, steps=steps):
            with job.step() as step:
                loss = job.model(batch) * step.loss_scale
                loss.backward()
                job.optimizer.step()
                time.sleep(pause)
                # Before the step ends: a job that goes on from it has its line, too.
                for writer in writers:
                    writer.write(job, loss=loss.item())
            if step.completed:
                report(log, job, loss)


class StepWriter(Protocol):
    """Writes a line of values per step; see `metrics.StepFile` and `board.StepBoard`."""

    def on_generation(self, entered: keepstep.GenerationEntered) -> None: ...

    def write(self, job: keepstep.Job, **values: float) -> None: ...


def step_writers(metrics: Path | None, tensorboard: Path | None) -> list[StepWriter]:
    writers: list[StepWriter] = [] if metrics is None else [StepFile(metrics)]
    if tensorboard is not None:
        # Here, for TensorBoard may not be installed.
        from board import StepBoard

        writers.append(StepBoard(tensorboard))
    return writers


def report(log: Path | None, job: keepstep.Job, loss: torch.Tensor) -> None:
    """Log or print the step. The batch's loss is the mean of the ranks' losses."""
    world = job.world
    if log is not None:
        line = {
            "step": job.steps, "loss": loss.item(), "at_s": time.monotonic(), "rank": world.rank,
            "world_size": world.world_size, "generation": world.generation,
        }  # fmt: skip
        with (log / f"rank-{world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    elif world.rank == 0 and job.steps % 10 == 0:
        print(f"step {job.steps}  loss {loss.item():.4f}  ranks {world.world_size}", flush=True)


if __name__ == "__main__":
    main()
