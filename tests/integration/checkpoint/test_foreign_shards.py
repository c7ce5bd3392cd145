"""Files that ranks of FSDP wrote with `torch.save`, each its shards, read bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from keepstep.checkpoint.errors import CheckpointDamaged, FormatUnsupported
from tests.integration.checkpoint.foreign_reads import assert_same
from tests.opened_checkpoints import open_foreign
from tests.ranks import run_ranks

KINDS = ("sharded_tensor", "dtensor", "fsdp2", "hybrid")


def model_of() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))


def save_shards(rank: int, root: str, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    cpu = torch.device("cpu")
    mesh = init_device_mesh("cpu", (world,))
    for kind in KINDS:
        model = model_of()
        if kind == "fsdp2":
            fully_shard(model, mesh=mesh)
        elif kind == "hybrid":
            names = ("copies", "shards")
            mesh_2d = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
            fully_shard(model, mesh=mesh_2d)
        else:
            model = FullyShardedDataParallel(
                model, device_id=cpu, device_mesh=mesh if kind == "dtensor" else None
            )
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        Path(root, kind).mkdir(exist_ok=True)
        state = {"model": dict(model.state_dict()), "step": 6, "rank_of": ["a", 1]}
        torch.save(state, f"{root}/{kind}/state_rank{rank}.pt")
    dist.barrier()
    os._exit(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    run_ranks(save_shards, args=(str(root), 4), nprocs=4)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_all_ranks_make_the_tensors(saved: Path, kind: str) -> None:
    source = open_foreign(str(saved / kind))
    expected = model_of().state_dict()
    for name, tensor in expected.items():
        assert_same(source, f"model/{name}", tensor)
    assert set(source.tensors) == {f"model/{name}" for name in expected}
    assert (source.step, source.left_out) == (6, ())
    assert source.documents["values"] == {"step": 6, "rank_of": ["a", 1]}


@pytest.mark.parametrize("kind", ["sharded_tensor", "fsdp2"])
def test_shards_of_a_rank_that_are_missing_or_double_are_noticed(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(saved / kind, tmp_path / "less")
    (tmp_path / "less" / "state_rank3.pt").unlink()
    with pytest.raises(CheckpointDamaged, match=r"elements, and only \d+ of them are in"):
        open_foreign(str(tmp_path / "less"))
    (tmp_path / "less" / "state_rank2.pt").unlink()
    shutil.copy(saved / kind / "state_rank0.pt", tmp_path / "less" / "state_rank1.pt")
    with pytest.raises(CheckpointDamaged, match=r"elements, and only \d+ of them are in"):
        open_foreign(str(tmp_path / "less"))


def test_files_that_are_not_one_of_each_rank_are_no_shards(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "fsdp2", tmp_path / "gap")
    (tmp_path / "gap" / "state_rank1.pt").unlink()
    with pytest.raises(FormatUnsupported, match="no checkpoint was recognized"):
        open_foreign(str(tmp_path / "gap"))
