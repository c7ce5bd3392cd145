"""Evaluates between steps, and stops early, through failures; rejects steps with a loss of NaN.

`keepstep run --nproc-per-node 2 examples/evaluation.py --steps 2000`

The evaluation comes before the step: it evaluates the state that the step begins with. If a peer
fails in it, the job recovers, and the evaluation runs again for the restored state.
"""

from __future__ import annotations

import functools

import click
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils.data import Subset

import keepstep


class Patience:
    """Counts evaluations without progress; part of the state, so that a recovery resets it."""

    def __init__(self, evaluations: int) -> None:
        self._evaluations = evaluations
        self._best = float("inf")
        self._without_progress = 0

    def is_over(self, loss: float) -> bool:
        """Record an evaluation; return whether there were too many without progress."""
        self._without_progress = 0 if loss < self._best else self._without_progress + 1
        self._best = min(self._best, loss)
        return self._without_progress >= self._evaluations

    def state_dict(self) -> dict[str, float]:
        return {"best": self._best, "without_progress": self._without_progress}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._best, self._without_progress = state["best"], int(state["without_progress"])


@torch.no_grad()
def evaluate(job: keepstep.Job, samples: Subset[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the mean loss of the samples; each rank computes a part of it."""
    world = job.world
    job.model.eval()
    # FSDP's collectives: all ranks must compute as many batches.
    own = [samples[i] for i in range(world.data_rank, len(samples), world.data_size)]
    own = own[: len(samples) // world.data_size]
    batch = (torch.stack([x for x, _ in own]), torch.stack([y for _, y in own]))
    mean = job.model(tuple(part.to(world.device) for part in batch))
    dist.all_reduce(mean)
    job.model.train()
    return float(mean) / world.world_size


@click.command()
@click.option("--steps", default=200)
@click.option("--global-batch", default=8)
@click.option("--every", default=10, help="Steps between evaluations.")
@click.option("--patience", default=3, help="Evaluations without progress before the job stops.")
@click.option("--learning-rate", default=1e-3)
def main(steps: int, global_batch: int, every: int, patience: int, learning_rate: float) -> None:
    counter = Patience(patience)
    windows = Windows(standard_library(), 32)
    training = Subset(windows, range(64, len(windows)))
    held_out = Subset(windows, range(64))

    def build(world: keepstep.World) -> keepstep.State:
        with torch.device("meta"):
            model = GPT(GPTConfig(width=32, layers=1, context=32))
        fully_shard(model, mesh=world.mesh["dp"])
        return keepstep.State(
            model,
            functools.partial(AdamW, lr=learning_rate),
            initialize=initialize,
            extra={"patience": counter},
        )

    with keepstep.join(build, on_bad_step=keepstep.BadSteps(spike=20.0)) as job:
        for batch in job.batches(training, global_batch, steps=steps):
            if job.steps % every == 0:
                with job.guard() as evaluation:
                    held_out_loss = evaluate(job, held_out)
                    if counter.is_over(held_out_loss):
                        job.stop()
                if not evaluation.completed:
                    continue  # The batch belongs to the generation that is over.
                if job.world.rank == 0:
                    print(f"after step {job.steps}: held-out loss {held_out_loss:.4f}", flush=True)
            with job.step() as step:
                loss = job.model(batch) * step.loss_scale
                step.report(loss=loss.detach())
                loss.backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0 and job.steps % every == 0:
                print(f"step {job.steps}  loss {loss.item():.4f}", flush=True)
        if job.world.rank == 0:
            print(f"stopped after step {job.steps}", flush=True)


if __name__ == "__main__":
    main()
