"""Tests with common kinds of models, saved in one layout and loaded in another by real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from keepstep import checkpoint
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.ranks import act_in_groups, run_ranks

Trained = tuple[nn.Module, torch.optim.Optimizer]


class MasterSGD(torch.optim.Optimizer):
    """SGD with momentum on fp32 master weights of bf16 parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float()
                    state["momentum"] = torch.zeros_like(state["master"])
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(state["momentum"] * group["lr"])
                parameter.copy_(state["master"])


class TiedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(53, 12)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 24) for _ in range(2))
        self.head = nn.Linear(12, 53, bias=False)
        self.head.weight = self.tokens.weight


class LoRA(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(20, 30)
        self.base.requires_grad_(False)
        self.down = nn.Linear(20, 3, bias=False)
        self.up = nn.Linear(3, 30, bias=False)


class MoE(nn.Module):
    """Eight experts stacked in each parameter, to be split over ranks, and a replicated router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, 6, 10))
        self.down = nn.Parameter(torch.randn(8, 10, 6))


def fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def expert_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "ep"))
    for name in ("up", "down"):
        split = distribute_tensor(getattr(model, name).detach(), mesh, [Replicate(), Shard(0)])
        setattr(model, name, nn.Parameter(split))
    return model


def unsharded(model: nn.Module) -> nn.Module:
    return model


def replicated(model: nn.Module) -> nn.Module:
    DistributedDataParallel(model)
    return model


def make(
    kind: Callable[[], nn.Module], layout: Callable[[nn.Module], nn.Module], seed: int
) -> Trained:
    torch.manual_seed(seed)
    model = kind()
    optimizer_of: Callable[..., torch.optim.Optimizer] = (
        MasterSGD if kind is Half else torch.optim.AdamW
    )
    model = layout(model)
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad], lr=0.1 + seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = (parameter.detach() * 0.5).contiguous()
    optimizer.step()
    return model, optimizer


class Half(nn.Sequential):
    """A model in bf16."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(9, 33), nn.LayerNorm(33), nn.Linear(33, 9))
        self.bfloat16()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(
    kind: Callable[[], nn.Module], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    expected_model, expected_optimizer = make(kind, unsharded, 0)
    for (name, want), got in zip(
        expected_model.named_parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(full(got).detach(), want.detach()), name
        assert got.dtype == want.dtype
        assert got.requires_grad == want.requires_grad
        for slot, value in expected_optimizer.state.get(want, {}).items():
            assert torch.equal(full(optimizer.state[got][slot]), value), (name, slot)
            assert optimizer.state[got][slot].dtype == value.dtype, (name, slot)
    assert optimizer.param_groups[0]["lr"] == 0.1


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any]]] = {
    "tied GPT, FSDP": (TiedGPT, fsdp, fsdp),
    "LoRA, FSDP": (LoRA, fsdp, fsdp),
    "bf16 with fp32 masters, FSDP": (Half, fsdp, fsdp),
    "MoE, expert-parallel to FSDP": (MoE, expert_parallel, fsdp),
    "MoE, FSDP to expert-parallel": (MoE, fsdp, expert_parallel),
    "tied GPT, DDP to FSDP": (TiedGPT, replicated, fsdp),
}


def run(rank: int, root: str, case: str) -> None:
    kind, saved, loaded = CASES[case]

    def save() -> None:
        model, optimizer = make(kind, saved, 0)
        checkpoint.save(f"{root}/run", {"model": model, "optimizer": optimizer}, step=1)

    def load() -> None:
        model, optimizer = make(kind, loaded, 1)
        checkpoint.load(f"{root}/run", {"model": model, "optimizer": optimizer})
        check(kind, model, optimizer)

    act_in_groups(rank, root, (4, save), (2, load))


@pytest.mark.parametrize("case", CASES)
def test_a_model_loads_in_another_layout(tmp_path: Path, case: str) -> None:
    run_ranks(run, args=(str(tmp_path), case), nprocs=4)
    kind = CASES[case][0]
    model, optimizer = make(kind, unsharded, 2)
    checkpoint.load(f"{tmp_path}/run", {"model": model, "optimizer": optimizer})
    check(kind, model, optimizer)
    stored = StoredCheckpoint.open(open_storage(f"{tmp_path}/run")).tensors
    if kind is TiedGPT:
        assert "model/head.weight" not in stored
    if kind is LoRA:
        assert not [key for key in stored if key.startswith("optim/base")]


class Stages(nn.Module):
    """Some stages of a model with two pipeline stages."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(5, 7), nn.Linear(7, 5)]
        self.stages = nn.ModuleDict({str(number): layers[number] for number in stages})


def trained_stages(stages: tuple[int, ...], lr: float) -> Trained:
    model = Stages(stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return model, optimizer


def pipeline(rank: int, root: str, save: bool) -> None:
    def act() -> None:
        model, optimizer = trained_stages((rank,), 0.1 if save else 0.7)
        state = {"model": model, "optimizer": optimizer}
        if save:
            checkpoint.save(f"{root}/run", state, step=1)
        else:
            checkpoint.load(f"{root}/run", state)
            check_stages(model, optimizer, (rank,))

    act_in_groups(rank, root, (2, act))


def check_stages(
    model: nn.Module, optimizer: torch.optim.Optimizer, stages: tuple[int, ...]
) -> None:
    expected_model, expected_optimizer = trained_stages(stages, 0.1)
    for want, got in zip(expected_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(want, got)
        expected_slot = expected_optimizer.state[want]["exp_avg"]
        assert torch.equal(expected_slot, optimizer.state[got]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_two_pipeline_stages_load_in_one_process_and_back(tmp_path: Path) -> None:
    pipelined, single = tmp_path / "pipelined", tmp_path / "single"
    for directory in (pipelined, single):
        directory.mkdir()
    run_ranks(pipeline, args=(str(pipelined), True), nprocs=2)
    model, optimizer = trained_stages((0, 1), 0.7)
    checkpoint.load(f"{pipelined}/run", {"model": model, "optimizer": optimizer})
    # All ranks use the same seed, so a stage's values do not depend on the rank that has it.
    expected, _ = trained_stages((0, 1), 0.1)
    assert all(
        torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True)
    )
    assert optimizer.param_groups[0]["lr"] == 0.1
    model, optimizer = trained_stages((0, 1), 0.1)
    checkpoint.save(f"{single}/run", {"model": model, "optimizer": optimizer}, step=1)
    run_ranks(pipeline, args=(str(single), False), nprocs=2)
