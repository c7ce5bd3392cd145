"""Tests of files of `torch.save`: what no group of the optimizer names is in them too."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.checkpoint.convert.write.planned_folder import write_file
from keepstep.checkpoint.convert.write.torch_target import torch_file
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.layout.boxes import Json
from tests.opened_checkpoints import open_foreign


def written_with(documents: dict[str, Json], directory: Path) -> dict[str, Any]:
    """Write the tensors of `a.pt` with other documents; return what PyTorch loads."""
    source = replace(open_foreign(str(directory / "a.pt")), documents=documents)
    pieces = torch_file(source, only_model=False)
    write_file(str(directory / "b.pt"), pieces, memory_nbytes=2**20, report=lambda nbytes: None)
    loaded: dict[str, Any] = torch.load(directory / "b.pt", weights_only=True)
    return loaded


def test_numbers_of_parameters_in_no_group_are_in_the_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    documents = {
        "optim/groups": [{"parameters": ["w"], "options": {}}],
        "optim/scalars": {"w/step": 3, "other/step": 4},
    }
    written = written_with(documents, tmp_path)
    assert written["optimizer"]["state"] == {0: {"step": 3}}
    assert written["optim"] == {"other": {"step": 4}}


def test_what_is_tied_to_a_transpose_shares_its_elements(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"w": weight}, tmp_path / "a.pt")
    documents = {"model/tied": {"h": {"name": "w", "transposed": True}}}
    written = written_with(documents, tmp_path)
    assert written.keys() == {"model", "step"}
    assert torch.equal(written["model"]["w"], weight)
    assert torch.equal(written["model"]["h"], weight.t())
    assert written["model"]["h"].data_ptr() == written["model"]["w"].data_ptr()


def test_a_disk_that_takes_no_more_is_told_in_words(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2**20)}, tmp_path / "a.pt")
    source = open_foreign(str(tmp_path / "a.pt"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"b\.pt cannot be written"):
            write_file(
                str(tmp_path / "b.pt"),
                torch_file(source, only_model=True),
                memory_nbytes=2**20,
                report=lambda nbytes: None,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
