"""PyTorch's own loader reads the folders of DCP that conversions write, on any number of ranks."""

from __future__ import annotations

import os
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
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.checkpoint.convert.write import dcp_leaves
from keepstep.checkpoint.errors import CheckpointExists
from tests.integration.checkpoint.converting import assert_equal, convert
from tests.ranks import run_ranks


class Model(nn.Module):
    """Odd sizes, a frozen layer, a buffer; tied weights where they are not sharded."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 6)
        self.up = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 31, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.arange(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.up(self.embedding(ids)).tanh()))


def optimizer_of(model: nn.Module, *, has_names: bool = True) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [(n, p) for n, p in named if "bias" in n], "weight_decay": 0.0},
        {"params": [(n, p) for n, p in named if "bias" not in n], "lr": 0.02},
    ]
    if not has_names:
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    return torch.optim.AdamW(groups, lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    ids = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(number))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, url: str, **more: Any) -> None:
    """Load a folder as users of FSDP2 do."""
    names, slots = get_state_dict(model, optimizer)
    state = {"model": names, "optim": slots}
    dcp.load(state, checkpoint_id=url, **more)
    set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=slots)


def load_torchtitan(model: nn.Module, optimizer: torch.optim.Optimizer, url: str) -> None:
    """Load a folder as torchtitan does."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    names = get_model_state_dict(model)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    counter = {"step": 0}
    state = {**names, "optimizer": flat, "train_state": counter}
    dcp.load(state, checkpoint_id=url)
    set_model_state_dict(model, names)
    set_optimizer_state_dict(model, optimizer, flat, options=options)
    assert counter["step"] == 3


def go_on(rank: int, root: str, world: int) -> None:
    """Load into sharded models, in each layout, and train a step."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store-{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    expected = torch.load(f"{root}/expected.pt")
    for loaded, url in ((load, f"{root}/dcp"), (load_torchtitan, f"{root}/titan/step-3")):
        torch.manual_seed(9)
        model = Model(is_tied=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        # torchtitan takes names of parameters out of its groups.
        optimizer = optimizer_of(model, has_names=loaded is load)
        loaded(model, optimizer, url)
        loss = step(model, optimizer, 3)
        torch.testing.assert_close(loss, expected["loss"])
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            torch.testing.assert_close(whole, expected["model"][name])
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def trained(path: Path, *, is_tied: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(is_tied=is_tied)
    optimizer = optimizer_of(model)
    for number in range(3):
        step(model, optimizer, number)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, path)
    return model, optimizer


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_leaves, "CHUNK_NBYTES", 200)
    monkeypatch.setattr(dcp_leaves, "FILE_NBYTES", 20_000)


@pytest.mark.usefixtures("small_files")
def test_sharded_models_go_on_from_chunks_that_no_rank_has_written(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "a.pt", is_tied=False)
    convert(tmp_path / "a.pt", tmp_path / "dcp", "--to", "dcp")
    convert(tmp_path / "a.pt", tmp_path / "titan", "--to", "torchtitan")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 2
    loss = step(model, optimizer, 3)
    torch.save({"loss": loss, "model": model.state_dict()}, tmp_path / "expected.pt")
    for world in (1, 2, 4):
        run_ranks(go_on, args=(str(tmp_path), world), nprocs=world)


@pytest.mark.usefixtures("small_files")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tied_weights_are_under_both_names_and_stored_once(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path / "a.pt", is_tied=True)
    convert(tmp_path / "a.pt", tmp_path / "dcp", "--to", "dcp")
    nbytes = sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    untied = tmp_path / "untied.pt"
    trained(untied, is_tied=False)
    convert(untied, tmp_path / "two", "--to", "dcp")
    assert nbytes < sum(path.stat().st_size for path in (tmp_path / "two").glob("*.distcp"))
    other = Model(is_tied=True)
    other_optimizer = optimizer_of(other)
    load(other, other_optimizer, str(tmp_path / "dcp"), no_dist=True)
    assert step(other, other_optimizer, 3) == step(model, optimizer, 3)


def test_a_folder_goes_through_s3(tmp_path: Path, s3: str) -> None:
    trained(tmp_path / "a.pt", is_tied=True)
    convert(tmp_path / "a.pt", f"{s3}/dcp", "--to", "dcp")
    convert(f"{s3}/dcp", f"{s3}/zero", "--to", "deepspeed", "--zero-stage", "3", "--ranks", "2")
    convert(f"{s3}/zero", tmp_path / "b.pt")
    before = torch.load(tmp_path / "a.pt", weights_only=True)
    after = torch.load(tmp_path / "b.pt", weights_only=True)
    assert_equal(after["optimizer"], before["optimizer"])
    assert_equal(dict(after["model"]), dict(sorted(before["model"].items())))
    with pytest.raises(CheckpointExists):
        convert(tmp_path / "a.pt", f"{s3}/dcp", "--to", "dcp")
