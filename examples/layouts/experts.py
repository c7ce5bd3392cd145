"""Spreads the experts of each layer over two ranks, and shards over all of them: EP with FSDP.

`keepstep run --nproc-per-node 4 examples/layouts/experts.py`

Ranks of `ep` have samples of their own, and exchange the tokens that belong to others' experts.
"""

import functools

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW
from transformer import Config, Experts, Sequences, Transformer, initialize, loss_of, report

import keepstep

config = Config(experts=4)


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
    """Send `sent[i]` rows to rank i of a group; return the rows that they sent here."""
    into = rows.new_empty(sum(received), rows.shape[1])
    return all_to_all_single(into, rows, received, sent, group=group)


class SpreadExperts(Experts):
    """Experts that are divided among the ranks of a mesh: tokens go there and come back."""

    mesh: DeviceMesh

    def spread(self, mesh: DeviceMesh) -> None:
        """Keep only this rank's experts."""
        self.mesh = mesh
        for name in ("up", "down"):
            # On the meta device, so that nothing is sent.
            part = distribute_tensor(getattr(self, name), mesh, [Shard(0)])
            setattr(self, name, torch.nn.Parameter(part))

    def dispatch(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ranks, group = self.mesh.size(), self.mesh.get_group()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        to_each = counts.view(ranks, -1).sum(1).tolist()
        from_each = received.view(ranks, -1).sum(1).tolist()
        arrived = exchange(tokens, to_each, from_each, group)
        # They arrive ordered by rank and then by expert; sort them by expert.
        experts = len(received) // ranks
        expert = torch.arange(len(received), device=tokens.device) % experts
        order = expert.repeat_interleave(received).argsort(stable=True)
        computed = self._compute(arrived[order], received.view(ranks, -1).sum(0))
        return exchange(computed[order.argsort()], from_each, to_each, group)

    def _compute(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        up, down = (local(weights) for weights in (self.up, self.down))
        parts = zip(tokens.split(counts.tolist()), up, down, strict=True)
        return torch.cat([torch.nn.functional.gelu(part @ u) @ d for part, u, d in parts])


def local(weights: torch.Tensor) -> torch.Tensor:
    """Return this rank's experts, which FSDP has gathered."""
    return weights.to_local() if isinstance(weights, DTensor) else weights


def spread_and_shard(model: Transformer, mesh: DeviceMesh) -> None:
    """Spread experts over `ep`, shard them over `dp_shard`, and all else over both."""
    ranks = mesh["dp_shard", "ep"]._flatten("dp_shard_ep")
    for layer in model.layers.values():
        layer.mlp.__class__ = SpreadExperts
        layer.mlp.spread(mesh["ep"])
        # Not with the experts: ranks of `ep` route samples of their own, with the same router.
        fully_shard(layer.mlp.router, mesh=ranks)
        fully_shard(layer.mlp, mesh=mesh["dp_shard"])
        # An expert's gradient sums over the tokens of all ranks, as many as share a batch.
        layer.mlp.set_gradient_divide_factor(float(ranks.size()))
        # gloo knows no other reduction.
        layer.mlp.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=ranks)
    fully_shard(model, mesh=ranks)


def build(world: keepstep.World) -> keepstep.State:
    with torch.device("meta"):
        model = Transformer(config)
    spread_and_shard(model, world.mesh)
    # Parameters lie on two meshes, which PyTorch's `foreach` does not mix.
    optimizer = functools.partial(AdamW, lr=1e-3, foreach=False)
    return keepstep.State(model, optimizer, initialize=initialize)


@click.command()
@click.option("--steps", default=100)
def main(steps: int) -> None:
    with keepstep.join(build, mesh={"dp_shard": -1, "ep": 2}) as job:
        for inputs, targets in job.batches(Sequences(config), global_batch=16, steps=steps):
            with job.step() as step:
                loss = loss_of(job.model(inputs), targets)
                (loss * step.loss_scale).backward()
                job.optimizer.step()
            if step.completed and job.world.rank == 0:
                report(job, loss)


if __name__ == "__main__":
    main()
