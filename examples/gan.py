"""Trains two models against each other, each with an optimizer, through failures.

`keepstep run --nproc-per-node 2 examples/gan.py --steps 2000`

The models are parts of one module, which is the job's; a step trains both, so that a recovery never
comes between them.
"""

from __future__ import annotations

import click
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep


def network(inputs: int, outputs: int) -> nn.Module:
    """Return a small network, with the same weights on all ranks: DDP sends rank 0's."""
    return DistributedDataParallel(
        nn.Sequential(
            nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
            nn.Linear(64, outputs),
        )
    )  # fmt: skip


class Ring:
    """Points on a circle, for the generator to learn."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        # Drawn from a generator that is seeded by the sample's number.
        angle = torch.rand(()) * 2 * torch.pi
        return torch.stack([angle.cos(), angle.sin()])


def build(world: keepstep.World) -> keepstep.State:
    models = nn.ModuleDict({"generator": network(8, 2), "discriminator": network(2, 1)})
    return keepstep.State(
        models.to(world.device),
        lambda _: [
            torch.optim.Adam(models["generator"].parameters(), lr=1e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(models["discriminator"].parameters(), lr=1e-3, betas=(0.5, 0.999)),
        ],
    )


@click.command()
@click.option("--steps", default=1000)
@click.option("--global-batch", default=256)
def main(steps: int, global_batch: int) -> None:
    with keepstep.join(build) as job:
        for real in job.batches(Ring(), global_batch, steps=steps):
            with job.step() as step:
                generator, discriminator = job.model["generator"], job.model["discriminator"]
                of_generator, of_discriminator = job.optimizers
                real = real.to(job.world.device)
                fake = generator(torch.randn(len(real), 8, device=real.device))
                scores = discriminator(torch.cat([real, fake.detach()]))
                is_real = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
                loss = F.binary_cross_entropy_with_logits(scores, is_real.to(scores))
                (loss * step.loss_scale).backward()
                of_discriminator.step()
                deceives = -F.logsigmoid(discriminator(fake)).mean() * step.loss_scale
                # Its gradients of the discriminator are cleared when a step begins.
                deceives.backward()
                of_generator.step()
            if step.completed and job.world.rank == 0 and job.steps % 50 == 0:
                radius = fake.detach().norm(dim=1).mean().item()
                print(f"step {job.steps}  loss {loss.item():.4f}  radius {radius:.3f}", flush=True)


if __name__ == "__main__":
    main()
