"""Tests of a change of layout: state saved in one layout loads in another, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.live.tensors import describe
from tests.ranks import act_in_groups, run_ranks


class Block(nn.Module):
    """A model with sizes that neither 2 nor 3 divides.

    One parameter has fewer rows than there are ranks, and one is frozen. Split 2 x 2 ways, the 30
    rows are 8, 7, 8 and 7: no regular grid, so chunks have pieces of two ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 30)
        self.down = nn.Linear(30, 7)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)


def reference() -> Block:
    torch.manual_seed(0)
    return Block()


def step_once(model: nn.Module) -> torch.optim.AdamW:
    """Do an elementwise step, which is the same in every layout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = (parameter.detach() * 0.5).contiguous()
    optimizer.step()
    return optimizer


def sharded(layout: str, model: Block) -> Block:
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_boxes(model: Block) -> None:
    """Check that every local shard is its box of the tensor, computed without communication."""
    for (name, parameter), expected in zip(
        model.named_parameters(), reference().parameters(), strict=True
    ):
        live = describe(name, parameter)
        shard = expected.detach()[live.box.slices]
        assert torch.equal(live.data.reshape(-1), shard.reshape(-1)), name


def check_equal(model: Block, optimizer: torch.optim.AdamW) -> None:
    expected_model = reference()
    expected_optimizer = step_once(expected_model)
    for (name, got), want in zip(
        model.named_parameters(), expected_model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            full(got).detach(), want.detach(), rtol=1e-6, atol=1e-7, msg=name
        )
        for slot, value in expected_optimizer.state[want].items():
            torch.testing.assert_close(
                full(optimizer.state[got][slot]), value, rtol=1e-6, atol=1e-7, msg=name
            )
            assert isinstance(optimizer.state[got][slot], DTensor) == (
                slot != "step" and isinstance(got, DTensor)
            )


def run(
    rank: int, root: str, layout_saved: str, world_saved: int, layout_loaded: str, world_loaded: int
) -> None:
    def save() -> None:
        model = sharded(layout_saved, reference())
        check_boxes(model)
        state = {"model": model, "optimizer": step_once(model), "values": {"epoch": 4}}
        checkpoint.save(f"{root}/run", state, step=8)

    def load() -> None:
        torch.manual_seed(1)
        model = sharded(layout_loaded, Block())
        optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1.0)
        values = {"epoch": 0}
        state = {"model": model, "optimizer": optimizer, "values": values}
        assert checkpoint.load(f"{root}/run", state) == 8
        check_equal(model, optimizer)
        assert values == {"epoch": 4}
        assert optimizer.param_groups[0]["lr"] == 0.1

    act_in_groups(rank, root, (world_saved, save), (world_loaded, load))


@pytest.mark.parametrize(
    ("saved", "world_saved", "loaded", "world_loaded"),
    [
        ("fsdp", 2, "fsdp", 3),
        ("fsdp+tp", 4, "fsdp", 3),
        ("fsdp", 3, "fsdp+tp", 4),
        ("replicas", 2, "fsdp", 2),
    ],
)
def test_state_saved_in_one_layout_loads_in_another(
    tmp_path: Path, saved: str, world_saved: int, loaded: str, world_loaded: int
) -> None:
    arguments = (str(tmp_path), saved, world_saved, loaded, world_loaded)
    run_ranks(run, args=arguments, nprocs=max(world_saved, world_loaded))
    # One process without a process group reads the same.
    model = Block()
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()))
    checkpoint.load(f"{tmp_path}/run", {"model": model, "optimizer": optimizer})
    check_equal(model, optimizer)


def fail_on_one(rank: int, root: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{root}/store", 2), rank=rank, world_size=2
    )
    state = {"x": torch.ones(3), "bad" if rank else "good": object() if rank else 1}
    with pytest.raises(CheckpointError, match="bad: a value of type object cannot be stored"):
        checkpoint.save(f"{root}/run", state, step=1)
    dist.destroy_process_group()


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(fail_on_one, args=(str(tmp_path),), nprocs=2)
    assert not (tmp_path / "run").exists()


def run_outside_of_a_mesh(rank: int, root: str) -> None:
    def act() -> None:
        mesh = DeviceMesh("cpu", [1])

        def state(value: float) -> dict[str, DTensor]:
            return {
                name: distribute_tensor(torch.full(shape, value), mesh, [Replicate()])
                for name, shape in (("scalar", ()), ("vector", (3,)), ("matrix", (3, 2)))
            }

        checkpoint.save(f"{root}/run", state(5.0), step=1)
        loaded = state(0.0)
        assert checkpoint.load(f"{root}/run", loaded) == 1
        for tensor in loaded.values():
            assert tensor.to_local().unique().tolist() == [5.0] * rank

    act_in_groups(rank, root, (2, act))


def test_ranks_outside_of_a_tensors_mesh_save_and_load_with_the_others(tmp_path: Path) -> None:
    run_ranks(run_outside_of_a_mesh, args=(str(tmp_path),), nprocs=2)
    loaded = {"scalar": torch.zeros(()), "vector": torch.zeros(3), "matrix": torch.zeros(3, 2)}
    assert checkpoint.load(f"{tmp_path}/run", loaded) == 1
    assert all(bool((tensor == 5).all()) for tensor in loaded.values())
