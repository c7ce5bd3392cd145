"""Folders that `torch.distributed.checkpoint.save` wrote from real processes, read bit for bit."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.restore import plan_fills
from keepstep.checkpoint.live.state_mapping import capture
from tests.integration.checkpoint.foreign_reads import assert_same
from tests.opened_checkpoints import open_foreign
from tests.ranks import run_ranks


class Model(nn.Module):
    """Odd sizes, fewer rows than ranks, a frozen parameter, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.narrow = nn.Parameter(torch.randn(3, 7))
        self.scale = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(5))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in trained if "norm" in n or "bias" in n], "weight_decay": 0.0},
            {"params": [p for n, p in trained if not ("norm" in n or "bias" in n)], "lr": 0.25},
        ]
    )


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model: nn.Module = Model()
    world = dist.get_world_size()
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "tp_fsdp2":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = optimizer_of(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = (parameter.detach() * 0.5).contiguous()
    optimizer.step()
    return model, optimizer


def full(tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if isinstance(tensor, torch.Tensor) and type(tensor).__name__ != "ShardedTensor":
        return tensor
    whole = torch.empty(tensor.size(), dtype=tensor.dtype) if dist.get_rank() == 0 else None
    tensor.gather(0, whole)
    return whole if whole is not None else torch.empty(0)


def save_states(rank: int, root: str, kind: str, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model, optimizer = trained(kind)
    names, slots = get_state_dict(model, optimizer)
    dcp.save(
        {"model": names, "optim": slots, "step": 12, "notes": {"deep": [1, None]}},
        checkpoint_id=f"{root}/together",
    )
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    # What torchtitan's checkpoint manager passes.
    titan = {
        **get_model_state_dict(model),
        "optimizer": flat,
        "lr_scheduler": {"last_epoch": 4},
        "train_state": {
            "step": torch.tensor(4, dtype=torch.int32),
            "ntokens_seen": torch.tensor(640),
        },
        "dataloader": {
            "world_size": world,
            **{f"dp_rank_{n}": pickle.dumps({"sample": n}) for n in range(world)},
        },
    }
    dcp.save(titan, checkpoint_id=f"{root}/titan/step-4")
    expected = {
        "model": {name: full(value) for name, value in names.items()},
        "optim": {
            name: {slot: full(value) for slot, value in values.items()}
            for name, values in slots["state"].items()
        },
    }
    if rank == 0:
        torch.save(expected, f"{root}/expected.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


LAYOUTS = (("fsdp2", 2), ("fsdp2", 4), ("tp_fsdp2", 4), ("fsdp1", 2))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1]}")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, world = request.param
    root = tmp_path_factory.mktemp(f"{kind}-{world}")
    run_ranks(save_states, args=(str(root), kind, world), nprocs=world)
    return root


def assert_complete(source: ForeignCheckpoint, root: Path) -> None:
    expected = torch.load(root / "expected.pt")
    keys = set()
    for name, tensor in expected["model"].items():
        keys.add(f"model/{name}")
        assert_same(source, f"model/{name}", tensor)
    for name, slots in expected["optim"].items():
        for slot, tensor in slots.items():
            keys.add(f"optim/{name}/{slot}")
            assert_same(source, f"optim/{name}/{slot}", tensor)
    assert {key for key in source.tensors if key.startswith(("model/", "optim/"))} == keys
    groups = source.documents["optim/groups"]
    assert [(g["options"]["lr"], g["options"]["weight_decay"]) for g in groups] == [
        (0.001, 0.0),
        (0.25, 0.01),
    ]
    assert sorted(name for g in groups for name in g["parameters"]) == sorted(expected["optim"])
    assert "norm.weight" in groups[0]["parameters"]


def test_state_of_model_and_optimizer_is_read_bit_for_bit(saved: Path) -> None:
    source = open_foreign(str(saved / "together"))
    assert_complete(source, saved)
    assert source.format_name == "PyTorch DCP"
    assert source.step == 12
    assert source.documents["values"] == {"step": 12, "notes/deep": [1, None]}
    assert source.left_out == ()


def test_layout_of_torchtitan_is_read_bit_for_bit(saved: Path) -> None:
    source = open_foreign(str(saved / "titan"))
    assert_complete(source, saved)
    assert source.format_name == "torchtitan"
    assert source.step == 4
    world = source.documents["values"]["dataloader/world_size"]
    assert source.documents["values"] == {
        "lr_scheduler/last_epoch": 4,
        "dataloader/world_size": world,
        **{f"dataloader/dp_rank_{n}/sample": n for n in range(world)},
    }
    assert_same(source, "train_state/ntokens_seen", torch.tensor(640))
    assert source.left_out == ()


def test_live_state_is_restored_from_what_ranks_saved(saved: Path) -> None:
    source = open_foreign(str(saved / "together"))
    torch.manual_seed(9)
    model = Model()
    optimizer = optimizer_of(model)
    allocate(model, [optimizer], source)
    fill(plan_fills(capture({"model": model, "optim": optimizer}), source), source)
    restore_options(model, [optimizer], source.documents)
    expected = torch.load(saved / "expected.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected["model"][name]), name
    for name, parameter in model.named_parameters():
        for slot, tensor in expected["optim"].get(name, {}).items():
            assert torch.equal(optimizer.state[parameter][slot], tensor), (name, slot)
    assert optimizer.param_groups[1]["lr"] == 0.25
