"""Trains low-rank adapters of a GPT on frozen weights, with FSDP2, through failures.

`keepstep run --nproc-per-node 2 examples/lora.py --steps 200`

The base model comes from a checkpoint of any format that keepstep reads (`--base`), else from a
seed. Frozen weights are part of the state like all others, so those of a lost rank are restored
from memory; the optimizer has only the adapters'.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
import torch
from gpt import GPT, GPTConfig, initialize
from text import Windows, standard_library
from torch import nn
from torch.distributed.fsdp import fully_shard

import keepstep


class LowRankLinear(nn.Module):
    """A frozen linear layer with a trained low-rank addition (Hu et al., arXiv 2106.09685)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.adapter_in = nn.Linear(frozen.in_features, rank, bias=False)
        self.adapter_out = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.adapter_out(self.adapter_in(x))
        return added + self.frozen(x)


def add_adapters(model: GPT, rank: int) -> None:
    """Freeze a model, and give the linear layers of its blocks adapters."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LowRankLinear(layer, rank))


def initialize_adapted(model: nn.Module) -> None:
    """Initialize all weights; the adapters add nothing at first."""
    initialize(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adapter_out" in name:
                parameter.zero_()


def optimize_adapters(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


@click.command()
@click.option("--steps", default=100)
@click.option("--global-batch", default=8)
@click.option("--width", default=64)
@click.option("--rank", default=4, help="Rank of the adapters.")
@click.option("--base", help="Checkpoint of the base model's weights.")
@click.option("--checkpoint", help="URL to store checkpoints under.")
def main(
    steps: int, global_batch: int, width: int, rank: int, base: str | None, checkpoint: str | None
) -> None:
    def build(world: keepstep.World) -> keepstep.State:
        with torch.device("meta"):
            model = GPT(GPTConfig(width=width, layers=2, context=64))
            add_adapters(model, rank)
        for block in model.blocks:
            fully_shard(block, mesh=world.mesh["dp"])
        fully_shard(model, mesh=world.mesh["dp"])

        def start(model: nn.Module) -> None:
            initialize_adapted(model)
            if base is not None:
                # The checkpoint has the names of the model without adapters.
                frozen = {
                    name.replace("frozen.", ""): parameter
                    for name, parameter in model.named_parameters()
                    if not parameter.requires_grad
                }
                keepstep.checkpoint.load(base, {"model": frozen}, strict=False)

        return keepstep.State(model, optimize_adapters, initialize=start)

    with keepstep.join(build, checkpoint=checkpoint) as job:
        for batch in job.batches(Windows(standard_library(), 64), global_batch, steps=steps):
            with job.step() as step:
                loss = job.model(batch) * step.loss_scale
                loss.backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0 and job.steps % 10 == 0:
                print(f"step {job.steps}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
