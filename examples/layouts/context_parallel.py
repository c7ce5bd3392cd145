"""Splits long sequences over two ranks, and shards parameters over all: CP with FSDP.

`keepstep run --nproc-per-node 4 examples/layouts/context_parallel.py`

Each rank has its part of every sequence, and gathers the keys and values of the others. PyTorch's
own `context_parallel` (ring attention) replaces `GatheringAttention` on GPUs: it has no kernel for
CPUs.
"""

import functools

import click
import torch
import torch.nn.functional as F
from fsdp2 import shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.optim import AdamW
from transformer import Attention, Config, Sequences, Transformer, initialize, loss_of, report

import keepstep

config = Config(length=64)


class GatheringAttention(Attention):
    """Causal attention of this rank's queries to the keys and values of all ranks of a mesh."""

    mesh: DeviceMesh

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        keys, values = (gathered(part, self.mesh) for part in (k, v))
        own = self.mesh.get_local_rank() * length + torch.arange(length, device=q.device)
        is_visible = own[:, None] >= torch.arange(keys.shape[2], device=q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=is_visible)


def gathered(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the parts of all ranks of a mesh along dimension 2; their gradients are summed."""
    whole = DTensor.from_local(part, mesh, [Shard(2)], run_check=False)
    return whole.full_tensor(grad_placements=[Partial()])


def build(world: keepstep.World) -> keepstep.State:
    with torch.device("meta"):
        model = Transformer(config)
    for layer in model.layers.values():
        layer.attention.__class__ = GatheringAttention
        layer.attention.mesh = world.mesh["cp"]
    # Gradients are means over all ranks: each has as many tokens.
    shard(model, world.mesh["dp", "cp"]._flatten("dp_cp"))
    return keepstep.State(model, functools.partial(AdamW, lr=1e-3), initialize=initialize)


def own_part(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's part of sequences."""
    return tensor.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


@click.command()
@click.option("--steps", default=100)
def main(steps: int) -> None:
    with keepstep.join(build, mesh={"dp": -1, "cp": 2}) as job:
        # Both ranks of `cp` get the same samples.
        for inputs, targets in job.batches(Sequences(config), global_batch=16, steps=steps):
            cp = job.world.mesh["cp"]
            positions = torch.arange(inputs.shape[1]).expand(inputs.shape)
            with job.step() as step:
                logits = job.model(own_part(inputs, cp), own_part(positions, cp))
                loss = loss_of(logits, own_part(targets, cp))
                (loss * step.loss_scale).backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0:
                report(job, loss)


if __name__ == "__main__":
    main()
