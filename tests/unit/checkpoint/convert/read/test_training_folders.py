"""Folders and files of training frameworks that are damaged, mixed, or do not say enough.

`test_files_of_libraries` reads those that the frameworks have written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing
from keepstep.checkpoint.format.layout.location import Format
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.test_hugging_face import weights
from tests.unit.checkpoint.convert.read.test_state_dicts import optimizer_of
from tests.unit.checkpoint.convert.read.written import tensor_of


def saved(directory: Path, name: str, value: object) -> None:
    torch.save(value, directory / name)


def state_of_groups() -> dict[str, Any]:
    decayed, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    return optimizer_of([{"params": [decayed]}, {"params": [other], "weight_decay": 0}])


def test_folder_of_an_adapter_without_one_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointMissing, match=r"no file 'adapter_model\.safetensors'"):
        open_foreign(str(tmp_path), Format.ADAPTER)


@pytest.mark.parametrize("weights_name", ["model.safetensors", "pytorch_model.bin.index.json"])
def test_order_of_files_is_not_taken_for_the_modules(tmp_path: Path, weights_name: str) -> None:
    names = [f"layers.{number}" for number in range(11)]
    if weights_name == "model.safetensors":
        (tmp_path / weights_name).write_bytes(weights(*sorted(names)))
    else:
        index = {"weight_map": {name: f"{name == names[-1]}.bin" for name in names}}
        (tmp_path / weights_name).write_text(json.dumps(index))
        saved(tmp_path, "False.bin", {name: torch.ones(2) for name in names[:-1]})
        saved(tmp_path, "True.bin", {names[-1]: torch.ones(2)})
    parameters = [nn.Parameter(torch.ones(2)) for _ in names]
    saved(tmp_path, "optimizer.bin", optimizer_of([{"params": parameters}]))
    saved(tmp_path, "random_states_0.pkl", {"step": 7})
    source = open_foreign(str(tmp_path))
    assert not [key for key in source.tensors if key.startswith("optim/")]
    ((name, reason),) = [(item.name, item.reason) for item in source.left_out]
    assert name == "optimizer.bin"
    assert "pass their names in the order of the optimizer's groups" in reason
    named = open_foreign(str(tmp_path), parameter_names=names)
    assert "optim/layers.10/momentum_buffer" in named.tensors


def test_checkpoints_in_folders_within_are_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights("w"))
    (tmp_path / "trainer_state.json").write_text('{"global_step": 20}')
    (tmp_path / "checkpoint-5").mkdir()
    old = optimizer_of([{"params": [nn.Parameter(torch.ones(2))]}])
    saved(tmp_path, "checkpoint-5/optimizer.pt", old)
    saved(tmp_path, "checkpoint-5/scheduler.pt", {"last_epoch": 5})
    source = open_foreign(str(tmp_path), parameter_names=["w"])
    assert (source.step, list(source.tensors)) == (20, ["model/w"])
    assert source.documents["values"] == {}
    reason = "it is in a folder of its own; convert that folder"
    assert {item.name: item.reason for item in source.left_out} == {
        "checkpoint-5/optimizer.pt": reason,
        "checkpoint-5/scheduler.pt": reason,
    }


def test_second_value_of_a_name_is_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights("w"))
    saved(tmp_path, "random_states_0.pkl", {"step": 7})
    saved(tmp_path, "scheduler.bin", {"last_epoch": 1})
    saved(tmp_path, "scheduler.pt", {"last_epoch": 2})
    source = open_foreign(str(tmp_path))
    assert source.documents["values"]["scheduler/last_epoch"] == 1
    assert [(item.name, item.reason) for item in source.left_out] == [
        ("scheduler/last_epoch", "another value has this name")
    ]


def lightning(**entries: object) -> dict[str, object]:
    return {
        "epoch": 1,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"net.a": torch.ones(3), "net.b": torch.ones(2)},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": [state_of_groups()],
        "lr_schedulers": [{"last_epoch": 30}],
        "hyper_parameters": {"lr": 0.1},
        **entries,
    }


def test_names_are_dealt_to_several_optimizers(tmp_path: Path) -> None:
    one = optimizer_of([{"params": [nn.Parameter(torch.ones(2))]}])
    other = optimizer_of([{"params": [nn.Parameter(torch.ones(3))]}])
    saved(tmp_path, "last.ckpt", lightning(optimizer_states=[one, other]))
    source = open_foreign(str(tmp_path / "last.ckpt"), parameter_names=["net.b", "net.a"])
    assert tensor_of(source, "optim/net.a/momentum_buffer").tolist() == [3, 3, 3]
    assert [group["parameters"] for group in source.documents["optim/groups"]] == [
        ["net.b"], ["net.a"],
    ]  # fmt: skip


def test_file_of_lightning_without_optimizer_state_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "last.ckpt", lightning(optimizer_states=[3]))
    with pytest.raises(CheckpointDamaged, match=r"last\.ckpt: optimizer_states.0 is no state"):
        open_foreign(str(tmp_path / "last.ckpt"))
    saved(tmp_path, "last.ckpt", lightning(optimizer_states={0: 1}))
    with pytest.raises(CheckpointDamaged, match=r"last\.ckpt: its optimizer_states are no list"):
        open_foreign(str(tmp_path / "last.ckpt"))
    saved(tmp_path, "last.ckpt", lightning(state_dict=[torch.ones(1)]))
    with pytest.raises(CheckpointDamaged, match=r"last\.ckpt: the module's state is a value"):
        open_foreign(str(tmp_path / "last.ckpt"))


def test_weights_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    saved(tmp_path, "pytorch_model.bin", [torch.ones(3)])
    with pytest.raises(CheckpointDamaged, match=r"pytorch_model\.bin: it has no tensors by name"):
        open_foreign(str(tmp_path))
