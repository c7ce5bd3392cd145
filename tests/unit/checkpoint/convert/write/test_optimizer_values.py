"""Claims about optimizers that keep more than tensors and numbers, in other tools' formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from keepstep import checkpoint
from keepstep.checkpoint.convert.write.optimizer_values import has_object, only_notes, plain_options
from keepstep.checkpoint.convert.write.planned_folder import write_file
from keepstep.checkpoint.convert.write.state_parts import parts_of
from keepstep.checkpoint.convert.write.torch_target import torch_file, torch_left_out
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.unit.checkpoint.test_optimizer_kinds import assert_equal, made, train


def converted(kind: str, path: Path) -> tuple[dict[str, Any], StoredCheckpoint]:
    """Return a file of `torch.save` made of a trained state's checkpoint, and the checkpoint."""
    state = made(kind)
    train(state, range(4))
    checkpoint.save(str(path / "run"), state, step=4)
    source = StoredCheckpoint.open(open_storage(str(path / "run")))
    pieces = torch_file(source, only_model=False)
    write_file(str(path / "a.pt"), pieces, memory_nbytes=2**20, report=lambda n: None)
    return torch.load(path / "a.pt", weights_only=False), source


@pytest.mark.parametrize(
    "kind",
    [
        "a number of its own", "with another beside it", "keyed by no parameter",
        "tensors in groups", "other strides", "a rate that is a tensor", "hooked",
    ],
)  # fmt: skip
def test_torchs_own_load_goes_on_from_a_converted_file(kind: str, tmp_path: Path) -> None:
    loaded, source = converted(kind, tmp_path)
    assert torch_left_out(source, only_model=False) == []
    straight, resumed = made(kind), made(kind)
    train(straight, range(8))
    resumed["model"].load_state_dict(loaded["model"])
    optimizer: Optimizer = resumed["optimizer"]
    optimizer.load_state_dict(loaded["optimizer"])
    if kind == "other strides":
        assert isinstance(loaded["optimizer"]["state"][0]["basis"], torch.Tensor)
    else:
        train(resumed, range(4, 8))
        assert_equal(straight, resumed)


def test_tensors_inside_of_containers_are_written(tmp_path: Path) -> None:
    loaded, source = converted("nested", tmp_path)
    state = made("nested")
    train(state, range(4))
    expected = state["optimizer"].state[state["model"][0].weight]
    got = loaded["optimizer"]["state"][0]
    assert torch.equal(got["factors"][0], expected["factors"][0])
    assert torch.equal(got["factors"][2][0], expected["factors"][2][0])
    assert [torch.equal(*pair) for pair in zip(got["last"], expected["last"], strict=True)] == [
        True
    ] * 3
    assert torch.equal(got["by dimension"][0], expected["by dimension"][0])
    lines = torch_left_out(source, only_model=False)
    assert len(lines) == 4
    assert lines[0].startswith("optim/0.weight/projection: it has an object")


def test_other_formats_get_a_number_for_a_rate_and_no_notes(tmp_path: Path) -> None:
    _, source = converted("a rate that is a tensor", tmp_path)
    rate = parts_of(source).groups[0].options["lr"]
    assert rate == torch.tensor(0.01).item()
    other = tmp_path / "other"
    other.mkdir()
    _, source = converted("other strides", other)
    assert parts_of(source).scalars == {}


def test_values_are_told_apart() -> None:
    assert only_notes("basis", {"$slot": {"name": "basis", "strides": [1, 7]}})
    assert not only_notes("basis", {"$slot": {"name": "basis.0"}})
    assert not only_notes("step", 3)
    assert has_object([{"a": {"$object": {}}}])
    assert not has_object({"a": [{"$slot": {"name": "b"}}]})
    assert plain_options({"betas": {"$tuple": [1, 2]}, "lr": 0.1}) == {"betas": (1, 2), "lr": 0.1}
