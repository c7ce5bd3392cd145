"""Copies the model to every rank and averages the gradients: DistributedDataParallel.

`keepstep run --nproc-per-node 4 examples/layouts/ddp.py`
"""

import functools

import click
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformer import Config, Sequences, Transformer, initialize, loss_of, report

import keepstep

config = Config()


def build(world: keepstep.World) -> keepstep.State:
    # DDP needs a model that has memory; its initial values count only at the job's start.
    model = Transformer(config).to(world.device)
    initialize(model)
    replicated = DistributedDataParallel(model, process_group=world.mesh.get_group("dp"))
    return keepstep.State(replicated, functools.partial(AdamW, lr=1e-3))


@click.command()
@click.option("--steps", default=100)
def main(steps: int) -> None:
    with keepstep.join(build, mesh={"dp": -1}) as job:
        for inputs, targets in job.batches(Sequences(config), global_batch=16, steps=steps):
            with job.step() as step:
                loss = loss_of(job.model(inputs), targets)
                (loss * step.loss_scale).backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0:
                report(job, loss)


if __name__ == "__main__":
    main()
