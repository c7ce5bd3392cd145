"""Tests of FSDP1 and of ZeroRedundancyOptimizer: their state loads elsewhere, and from elsewhere.

Ranks are real processes over gloo. All updates are elementwise and start from equal values, so that
what is loaded equals the reference to the bit in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from keepstep import checkpoint
from keepstep.checkpoint.live.capture import LiveStateReader
from tests.ranks import act_in_groups, run_ranks


class Block(nn.Module):
    """Sizes that no number of ranks divides, a buffer, and a parameter smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("scratch", torch.randn(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum() * self.scale + self.cube.sum()


class Model(nn.Module):
    """Two blocks, and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.embedding(x)).sum(0)[:7]
        return sum((block(x) for block in self.blocks), start=x.sum())


def model_of(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do a step on gradients that are elementwise of the parameters, and of any flat form."""
    for parameter in model.parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if held.numel() or isinstance(parameter, DTensor):
            parameter.grad = (parameter.detach() * 0.5).contiguous()
    optimizer.step()


def evaluate(module: nn.Module) -> torch.Tensor:
    """Compute without a backward pass, after which FSDP's outermost unit stays gathered."""
    with torch.no_grad():
        return module(torch.arange(3))


def wrapped(layout: str, model: Model) -> tuple[nn.Module, nn.Module]:
    """Return what has the parameters, and what is saved."""
    if layout.startswith("fsdp1"):
        strategy = ShardingStrategy.NO_SHARD if "whole" in layout else ShardingStrategy.FULL_SHARD
        module = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params="orig" in layout,
            sharding_strategy=strategy, device_id=torch.device("cpu"),
        )  # fmt: skip
        return module, module
    if layout == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if layout in ("ddp", "zero"):
        module = DistributedDataParallel(model)
        return module, module.module
    return model, model


def optimizer_of(layout: str, module: nn.Module, lr: float) -> torch.optim.Optimizer:
    if layout == "zero":
        return ZeroRedundancyOptimizer(
            module.parameters(), optimizer_class=torch.optim.AdamW, lr=lr
        )
    return torch.optim.AdamW(module.parameters(), lr=lr)


def contents(state: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return, by key, the elements that this rank holds of each tensor, and which they are."""
    reader = LiveStateReader(state["model"], [state["optimizer"]])
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor in reader.capture().tensors:
        values, held = found.setdefault(
            tensor.key,
            (torch.zeros(tensor.global_shape), torch.zeros(tensor.global_shape, dtype=torch.bool)),
        )
        values[tensor.box.slices] = tensor.data.reshape(tensor.box.shape).float()
        held[tensor.box.slices] = True
    return found


def reference(steps: int) -> dict[str, torch.Tensor]:
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step_once(model, optimizer)
    return {
        key: values
        for key, (values, _) in contents({"model": model, "optimizer": optimizer}).items()
    }


def check_equal(state: Mapping[str, Any], steps: int = 1) -> None:
    """Check that ranks together hold the reference's keys and elements, all equal to the bit."""
    expected = reference(steps)
    found = contents(state)
    assert {key for key in found if key.startswith("model/")} == {
        key for key in expected if key.startswith("model/")
    }
    for key, values in expected.items():
        own_values, held = found.get(
            key, (torch.zeros_like(values), torch.zeros_like(values).bool())
        )
        assert torch.equal(own_values[held], values[held]), key
        everywhere = held.int()
        if dist.is_initialized():
            dist.all_reduce(everywhere)
        assert bool(everywhere.all()), key
    assert found.keys() <= expected.keys()


def run(rank: int, root: str, saved: str, world_saved: int, loaded: str, world_loaded: int) -> None:
    def save() -> None:
        module, model = wrapped(saved, model_of(0))
        optimizer = optimizer_of(saved, module, lr=0.1)
        step_once(module, optimizer)
        evaluate(module)
        state = {"model": model, "optimizer": optimizer}
        check_equal(state)
        evaluate(module)
        checkpoint.save(f"{root}/run", state, step=8)

    def load() -> None:
        module, model = wrapped(loaded, model_of(1))
        optimizer = optimizer_of(loaded, module, lr=1.0)
        # What is gathered for a forward pass must not be used after the load.
        before = evaluate(module)
        state = {"model": model, "optimizer": optimizer}
        assert checkpoint.load(f"{root}/run", state) == 8
        check_equal(state)
        assert optimizer.param_groups[0]["lr"] == 0.1
        # No rank has kept a slot that it does not update.
        step_once(module, optimizer)
        check_equal(state, steps=2)
        whole = model_of(0)
        whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
        step_once(whole, whole_optimizer)
        step_once(whole, whole_optimizer)
        after = evaluate(module)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, evaluate(whole))

    act_in_groups(rank, root, (world_saved, save), (world_loaded, load))


@pytest.mark.parametrize(
    ("saved", "world_saved", "loaded", "world_loaded"),
    [
        ("fsdp1 orig", 3, "fsdp2", 2),
        ("fsdp2", 3, "fsdp1 orig", 2),
        ("fsdp1 flat", 3, "ddp", 2),
        ("ddp", 2, "fsdp1 flat", 3),
        ("fsdp1 whole orig", 2, "fsdp1 flat", 2),
        ("zero", 3, "zero", 2),
        ("zero", 2, "fsdp1 orig", 3),
        ("fsdp1 flat", 2, "zero", 2),
    ],
)
def test_flat_and_divided_state_loads_in_any_layout(
    tmp_path: Path, saved: str, world_saved: int, loaded: str, world_loaded: int
) -> None:
    arguments = (str(tmp_path), saved, world_saved, loaded, world_loaded)
    run_ranks(run, args=arguments, nprocs=max(world_saved, world_loaded))
    # One process without a process group reads the same, and its names are those of the model.
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    checkpoint.load(f"{tmp_path}/run", {"model": model, "optimizer": optimizer})
    check_equal({"model": model, "optimizer": optimizer})


def test_one_process_saves_for_fsdp1(tmp_path: Path) -> None:
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_once(model, optimizer)
    checkpoint.save(f"{tmp_path}/run", {"model": model, "optimizer": optimizer}, step=8)
    run_ranks(run, args=(str(tmp_path), "", 0, "fsdp1 flat", 2), nprocs=2)
