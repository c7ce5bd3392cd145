"""Tests of `torch.distributed.checkpoint` on this format, between real processes and layouts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.checkpoint.dcp import Reader, Writer
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.ranks import run_ranks


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 30), nn.LayerNorm(30), nn.Linear(30, 7))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for parameter in model.parameters():
        parameter.grad = (parameter.detach() * 0.5).contiguous()
    optimizer.step()
    return model, optimizer


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(rank: int, root: str) -> None:
    torch.set_num_threads(1)
    for world, phase in ((3, "save"), (2, "load")):
        if rank < world:
            dist.init_process_group(
                "gloo", store=dist.FileStore(f"{root}/{phase}", world), rank=rank, world_size=world
            )
            model, optimizer = trained(0 if phase == "save" else 1)
            names, slots = get_state_dict(model, optimizer)
            state = {"model": names, "optim": slots, "epoch": 4, "notes": {"deep": [1, None]}}
            if phase == "save":
                dcp.save(state, storage_writer=Writer(f"{root}/run", step=8))
                dcp.async_save(state, storage_writer=Writer(f"{root}/run", step=9)).result()
            else:
                state["epoch"] = 0
                dcp.load(state, storage_reader=Reader(f"{root}/run", step=8))
                assert (state["epoch"], state["notes"]) == (4, {"deep": [1, None]})
                set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=slots)
                check(model, optimizer)
            dist.barrier()
            dist.destroy_process_group()
    os._exit(0)


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        expected_model, expected_optimizer = trained(0)
    for want, got in zip(expected_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(got).detach(), want.detach())
        for slot, value in expected_optimizer.state[want].items():
            assert torch.equal(full(optimizer.state[got][slot]), value), slot
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_two_ranks_load_what_three_ranks_saved(tmp_path: Path) -> None:
    run_ranks(run, args=(str(tmp_path),), nprocs=3)
    stored = StoredCheckpoint.open(open_storage(f"{tmp_path}/run"), 9)
    group = zarr.open(tmp_path / "run" / stored.directory, mode="r")
    assert group["model.0.weight"].shape == (30, 7)


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    state = {"x": torch.arange(6.0).reshape(2, 3), "n": 3}
    dcp.save(state, storage_writer=Writer(tmp_path, step=1), no_dist=True)
    filled = {"x": torch.zeros(2, 3).t().contiguous().t(), "n": 0}
    dcp.load(filled, storage_reader=Reader(tmp_path), no_dist=True)
    assert torch.equal(filled["x"], state["x"])
    assert filled["n"] == 3
    assert (
        StoredCheckpoint.open(open_storage(str(tmp_path))).documents["provenance"]["world_size"]
        == 1
    )


def agreed_loads(
    directory: Path, *states: dict[str, Any]
) -> list[tuple[Reader, DefaultLoadPlanner, LoadPlan, dict[str, Any]]]:
    """Save each state as the next step, have a rank look for the newest one then, and agree."""
    found = []
    for step, state in enumerate(states, 1):
        dcp.save(state, storage_writer=Writer(directory, step=step), no_dist=True)
        reader, planner = Reader(directory), DefaultLoadPlanner()
        filled = {"x": torch.zeros(3), "n": 0}
        planner.set_up_planner(filled, reader.read_metadata(), is_coordinator=step == 1)
        found.append((reader, planner, filled))
    plans = [reader.prepare_local_plan(planner.create_local_plan()) for reader, planner, _ in found]
    agreed = found[0][0].prepare_global_plan(plans)
    return [(*of_rank[:2], plan, of_rank[2]) for of_rank, plan in zip(found, agreed, strict=True)]


def test_ranks_that_find_different_checkpoints_all_load_the_newest(tmp_path: Path) -> None:
    """One is committed while they look: each looked for itself, and loaded what it had found."""
    states = [{"x": torch.full((3,), float(step)), "n": step} for step in (1, 2)]
    for reader, planner, plan, filled in agreed_loads(tmp_path, *states):
        reader.read_data(planner.finish_plan(plan), planner)
        assert torch.equal(filled["x"], torch.full((3,), 2.0))
        assert filled["n"] == 2


def test_a_checkpoint_with_other_names_that_appears_during_a_load_is_refused(
    tmp_path: Path,
) -> None:
    state = {"x": torch.ones(3), "n": 1}
    (reader, planner, plan, _), _ = agreed_loads(tmp_path, state, state)
    dcp.save({"y": torch.ones(3)}, storage_writer=Writer(tmp_path, step=3), no_dist=True)
    newest = replace(plan, storage_data=list_steps(open_storage(str(tmp_path)))[0])
    with pytest.raises(LayoutMismatch, match=r"does not have [nx]; load again, or name"):
        reader.read_data(planner.finish_plan(newest), planner)


def test_a_planner_that_caches_plans_is_refused_at_the_first_save(tmp_path: Path) -> None:
    """From the second save on it would send plans without tensors."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in (1, 2):
        with pytest.raises(
            (LayoutMismatch, dcp.api.CheckpointException), match="enable_plan_caching=False"
        ):
            dcp.save(
                {"x": torch.ones(3)},
                storage_writer=Writer(tmp_path, step=step),
                planner=planner,
                no_dist=True,
            )
    assert list_steps(open_storage(str(tmp_path))) == ()


def test_a_plan_without_the_tensors_of_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="enable_plan_caching=False"):
        Writer(tmp_path, step=1).prepare_global_plan([SavePlan([]), SavePlan([], usable=False)])


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.ones(3, device="meta")],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_cannot_be_stored_is_refused_before_anything_is_written(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointException, match="LayoutMismatch: s"):
        dcp.save(
            {"a": torch.ones(2), "s": tensor},
            storage_writer=Writer(str(tmp_path), step=1),
            no_dist=True,
        )
    assert not list(tmp_path.iterdir())


def test_an_expanded_tensor_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "s": torch.ones(4), "one": torch.arange(1.0, 2.0)}
    dcp.save(saved, storage_writer=Writer(str(tmp_path), step=1), no_dist=True)
    state = {"a": torch.zeros(2), "s": torch.zeros(1).expand(4), "one": torch.zeros(1, 11)[0, ::11]}
    with pytest.raises(CheckpointException, match="LayoutMismatch: s: several elements"):
        dcp.load(state, storage_reader=Reader(str(tmp_path)), no_dist=True)
    assert state["a"].tolist() == [0, 0]
    state["s"] = torch.zeros(4)
    dcp.load(state, storage_reader=Reader(str(tmp_path)), no_dist=True)
    assert [state[name].tolist() for name in saved] == [[1, 1], [1, 1, 1, 1], [1]]


def test_a_value_that_would_be_pickled_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises((LayoutMismatch, dcp.api.CheckpointException), match="odd"):
        dcp.save({"odd": object()}, storage_writer=Writer(tmp_path, step=1), no_dist=True)
