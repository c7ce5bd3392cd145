"""Tests of fused parameters that tensor parallelism slices part by part, in real processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from keepstep import checkpoint
from keepstep.checkpoint import Descriptions, Part, PartTable
from keepstep.checkpoint.errors import LayoutMismatch
from tests.ranks import act_in_groups, run_ranks

GATE_UP = PartTable(0, (Part("gate", 12), Part("up", 12)))
QKV = PartTable(0, (Part("q", 16), Part("k", 4, 2), Part("v", 4, 2)), groups=2)
EXPERTS = PartTable(1, (Part("gate", 8), Part("up", 8)))
PARTS = Descriptions(parts={"*.gate_up.*": GATE_UP, "*.qkv.*": QKV, "*.experts": EXPERTS})


def sliced(table: PartTable, whole: torch.Tensor, degree: int, rank: int) -> torch.Tensor:
    """Return what a rank computes with, made by hand: slices of every part."""
    groups = torch.chunk(whole, table.groups, dim=table.axis)
    sharers = max(1, degree // table.groups)
    per_rank = max(1, table.groups // degree)
    first = rank // sharers * per_rank
    local = []
    for group in groups[first : first + per_rank]:
        extents = [part.extent // table.groups for part in table.parts]
        for part, rows in zip(table.parts, torch.split(group, extents, table.axis), strict=True):
            count = sharers if part.most_slices is None else 1
            local.append(torch.chunk(rows, count, table.axis)[rank % sharers * count // sharers])
    return torch.cat(local, dim=table.axis)


class Layer(nn.Module):
    """Fused projections: gate and up, q, k and v in two query groups, and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(5, 24)
        self.qkv = nn.Linear(5, 24, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 16, 5))
        self.norm = nn.Parameter(torch.randn(5))


def whole_model(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"layer": Layer()})


def slice_parameters(model: nn.ModuleDict, mesh: DeviceMesh) -> None:
    """Give each rank its slices, as a tensor-parallel layer makes them."""
    layer = model["layer"]
    for module, name, table in [
        (layer.gate_up, "weight", GATE_UP),
        (layer.gate_up, "bias", GATE_UP),
        (layer.qkv, "weight", QKV),
        (layer, "experts", EXPERTS),
    ]:
        whole = getattr(module, name).detach()
        local = sliced(table, whole, mesh.size(), mesh.get_local_rank()).contiguous()
        shard = DTensor.from_local(local, mesh, [Shard(table.axis)], run_check=False)
        setattr(module, name, nn.Parameter(shard))


def build(layout: str, seed: int) -> nn.ModuleDict:
    model = whole_model(seed)
    if layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        slice_parameters(model, mesh)
    elif layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        slice_parameters(model, mesh["tp"])
        fully_shard(model["layer"], mesh=mesh["dp"])
    elif layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        fully_shard(model["layer"], mesh=mesh)
    return model


def step_once(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = (parameter.detach() * 0.5).contiguous()
    optimizer.step()
    return optimizer


def local_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    """Return the local elements of all parameters and slots, in order."""
    values = []
    for parameter in model.parameters():
        for tensor in (parameter, *(v for _, v in sorted(optimizer.state[parameter].items()))):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            values.append(local.detach().reshape(-1))
    return values


def run(rank: int, root: str, saved: str, world_saved: int, loaded: str, world_loaded: int) -> None:
    def save() -> None:
        model = build(saved, seed=0)
        state = {"model": model, "optimizer": step_once(model)}
        checkpoint.save(f"{root}/run", state, step=8, descriptions=PARTS)

    def load() -> None:
        expected_model, model = build(loaded, seed=0), build(loaded, seed=1)
        expected = local_values(expected_model, step_once(expected_model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        state = {"model": model, "optimizer": optimizer}
        assert checkpoint.load(f"{root}/run", state, descriptions=PARTS) == 8
        for got, want in zip(local_values(model, optimizer), expected, strict=True):
            assert torch.equal(got, want)

    act_in_groups(rank, root, (world_saved, save), (world_loaded, load))


@pytest.mark.parametrize(
    ("saved", "world_saved", "loaded", "world_loaded"),
    [("tp", 2, "tp", 4), ("tp", 4, "fsdp+tp", 4), ("fsdp+tp", 4, "fsdp", 3), ("fsdp", 2, "tp", 2)],
)
def test_sliced_parts_are_stored_as_the_unsharded_tensor(
    tmp_path: Path, saved: str, world_saved: int, loaded: str, world_loaded: int
) -> None:
    arguments = (str(tmp_path), saved, world_saved, loaded, world_loaded)
    run_ranks(run, args=arguments, nprocs=max(world_saved, world_loaded))
    # One process reads the unsharded tensors without knowing the parts.
    expected_model, model = whole_model(0), whole_model(1)
    expected_optimizer = step_once(expected_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    checkpoint.load(f"{tmp_path}/run", {"model": model, "optimizer": optimizer})
    expected = local_values(expected_model, expected_optimizer)
    for got, want in zip(local_values(model, optimizer), expected, strict=True):
        assert torch.equal(got, want)


def with_rows(model: nn.ModuleDict) -> torch.optim.AdamW:
    """Return an optimizer that keeps the sums of the rows of a fused parameter."""
    optimizer = step_once(model)
    weight = model["layer"].gate_up.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    rows = local.detach().sum(1)
    if isinstance(weight, DTensor):
        rows = DTensor.from_local(rows, weight.device_mesh, [Shard(0)], run_check=False)
    optimizer.state[weight]["rows"] = rows
    return optimizer


def save_rows(rank: int, root: str) -> None:
    def save() -> None:
        model = build("tp", seed=0)
        optimizer = with_rows(model)
        state = {"model": model, "optimizer": optimizer}
        checkpoint.save(f"{root}/run", state, step=1, descriptions=PARTS)
        slots = optimizer.state[model["layer"].gate_up.weight]
        slots["rows"] = DTensor.from_local(torch.ones(3), slots["rows"].device_mesh, [Shard(0)])
        with pytest.raises(LayoutMismatch, match=r"gate_up\.weight/rows: tensor parallelism"):
            checkpoint.save(f"{root}/run", state, step=2, descriptions=PARTS)

    act_in_groups(rank, root, (2, save))


def test_slots_of_the_fused_dimension_have_its_parts_and_other_slices_are_refused(
    tmp_path: Path,
) -> None:
    run_ranks(save_rows, args=(str(tmp_path),), nprocs=2)
    expected_model, model = whole_model(0), whole_model(1)
    expected_optimizer, optimizer = with_rows(expected_model), with_rows(model)
    checkpoint.load(f"{tmp_path}/run", {"model": model, "optimizer": optimizer})
    expected = expected_optimizer.state[expected_model["layer"].gate_up.weight]["rows"]
    assert torch.allclose(optimizer.state[model["layer"].gate_up.weight]["rows"], expected)


def refuse(rank: int, root: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{root}/store", 2), rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(torch.ones(12, 5), mesh, [Shard(0)])
    described = Descriptions(parts={"qkv.*": QKV})
    with pytest.raises(LayoutMismatch, match=r"qkv\.weight: .*mesh_dim_names"):
        checkpoint.save(f"{root}/run", {"qkv.weight": shard}, step=1, descriptions=described)
    uneven = PartTable(0, (Part("q", 21), Part("k", 3)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shard = DTensor.from_local(torch.ones(12, 5), mesh, [Shard(0)])
    described = Descriptions(parts={"qkv.*": uneven})
    with pytest.raises(LayoutMismatch, match=r"qkv\.weight: part 'q'"):
        checkpoint.save(f"{root}/run", {"qkv.weight": shard}, step=1, descriptions=described)
    dist.destroy_process_group()


def test_parts_that_cannot_be_told_or_cut_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks(refuse, args=(str(tmp_path),), nprocs=2)


def test_a_table_of_another_size_than_the_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match=r"qkv\.weight: dimension 0 .* have 24 elements"):
        checkpoint.save(
            str(tmp_path),
            {"qkv.weight": torch.ones(25, 5)},
            step=1,
            descriptions=Descriptions(parts={"qkv.*": QKV}),
        )
