"""Tests of padding, masters and ties between numbers of ranks, in real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from keepstep import checkpoint
from keepstep.checkpoint import Descriptions
from tests.ranks import run_ranks

LOGICAL = (50, 6)
DESCRIPTIONS = Descriptions(padding={"embed.weight": LOGICAL, "head.weight": (6, 50)})


class Model(nn.Module):
    """An embedding of a padded vocabulary, and a head that is its transpose."""

    def __init__(self, rows: int, *, is_tied: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.embed = nn.Embedding(rows, 6)
        self.head = nn.Linear(rows, 6, bias=False)
        if is_tied:
            self.tie()

    def tie(self) -> None:
        self.head.weight = nn.Parameter(self.embed.weight.t())


def saved_model() -> tuple[Model, torch.optim.Adam]:
    torch.manual_seed(0)
    model = Model(64, is_tied=True).bfloat16()
    # `bfloat16` gives each parameter memory of its own.
    model.tie()
    optimizer = torch.optim.Adam([model.embed.weight, *model.norm.parameters()])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter, slots in optimizer.state.items():
        slots["master_param"] = parameter.detach().float() + 2**-12
    return model, optimizer


def load(rank: int, root: str, world: int, rows: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{root}/load", world), rank=rank, world_size=world
    )
    torch.manual_seed(1)
    model = Model(rows, is_tied=False)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    padding = model.embed.weight.detach()[50:].clone()
    model.embed.weight = nn.Parameter(distribute_tensor(model.embed.weight, mesh, [Shard(0)]))
    head_padding = model.head.weight.detach()[:, 50:].clone()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(1)]))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    # What Adam knows of the tied weight is taken by one of its names.
    step = checkpoint.load(f"{root}/run", state, descriptions=DESCRIPTIONS, strict=False)
    assert step == 7

    saved, saved_optimizer = saved_model()
    slots = saved_optimizer.state[saved.embed.weight]
    embed, head = whole(model.embed.weight), whole(model.head.weight)
    assert torch.equal(embed[:50], slots["master_param"][:50])
    assert torch.equal(embed[50:], padding)
    assert torch.equal(head[:, :50], slots["master_param"][:50].t())
    assert torch.equal(head[:, 50:], head_padding)
    moments = whole(optimizer.state[model.embed.weight]["exp_avg"])
    assert torch.equal(moments[:50], slots["exp_avg"][:50])
    assert not moments[50:].any()
    dist.barrier()
    dist.destroy_process_group()
    # Models still refer to gloo's groups, whose threads may abort an interpreter that exits
    # normally.
    os._exit(0)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


@pytest.mark.parametrize(("world", "rows"), [(2, 50), (3, 96)])
def test_padded_tied_weights_with_masters_load_into_any_number_of_ranks(
    tmp_path: Path, world: int, rows: int
) -> None:
    model, optimizer = saved_model()
    checkpoint.save(
        f"{tmp_path}/run",
        {"model": model, "optimizer": optimizer},
        step=7,
        descriptions=DESCRIPTIONS,
    )
    run_ranks(load, args=(str(tmp_path), world, rows), nprocs=world)
