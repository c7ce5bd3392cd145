"""Files of training scripts become named tensors and documents, and nothing is lost unsaid."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep.checkpoint.convert.read.contents import has_tensor
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.errors import CheckpointDamaged, FormatUnsupported
from keepstep.checkpoint.format.layout.completeness import ONLY_MODEL
from keepstep.checkpoint.live.allocation import allocate
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.fills import fill
from keepstep.checkpoint.live.optimizer_options import restore_options
from keepstep.checkpoint.live.restore import plan_fills
from tests.adaptive_timeouts import patient
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.written import tensor_of

W = torch.arange(3.0)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))  # type: ignore[no-any-return]


def trained(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **options)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.arange(5)).square().sum().backward()
        optimizer.step()
    return optimizer


def opened(directory: Path, value: object, **options: Any) -> ForeignCheckpoint:
    torch.save(value, directory / "it.pt")
    return open_foreign(str(directory / "it.pt"), **options)


def test_live_model_and_optimizer_are_filled_from_a_file(tmp_path: Path) -> None:
    """The next step of training is the same as without the file in between."""
    net = Net()
    optimizer = trained(net, amsgrad=True)
    source = opened(
        tmp_path, {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    )
    assert source.step == 2
    assert source.documents["model/tied"] == {"head.weight": "embedding.weight"}
    assert source.left_out == ()
    other = Net(seed=1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0, amsgrad=True)
    allocate(other, [other_optimizer], source)
    live = LiveStateReader(other, [other_optimizer]).capture()
    fill(plan_fills(live, source, strict=True, convert=False, requested=ONLY_MODEL), source)
    restore_options(other, [other_optimizer], source.documents)
    for one, its_optimizer in ((net, optimizer), (other, other_optimizer)):
        its_optimizer.zero_grad()
        one(torch.arange(5)).square().sum().backward()
        its_optimizer.step()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("name", ["model", "state_dict", "model_state_dict", "module"])
def test_conventions_of_scripts_are_known(tmp_path: Path, name: str) -> None:
    state = {"w": torch.arange(3.0)}
    source = opened(
        tmp_path,
        {
            "ema": {"w": torch.zeros(3)},
            name: state,
            "epoch": 4,
            "args": argparse.Namespace(lr=0.5, path=Path("/a/b"), dtype=torch.bfloat16),
            "scheduler": {"last_epoch": 3, "lrs": [torch.tensor(0.25)]},
            "numpy": {"state": np.arange(4, dtype=np.uint32), "position": 1},
            "none": None,
            "class": nn.Linear,
            "sparse": torch.eye(2).to_sparse(),
        },
    )
    assert tensor_of(source, "model/w").tolist() == [0, 1, 2]
    assert tensor_of(source, "ema/w").tolist() == [0, 0, 0]
    assert tensor_of(source, "scheduler/lrs/0") == 0.25
    assert tensor_of(source, "numpy/state").tolist() == [0, 1, 2, 3]
    assert source.documents["values"] == {
        "epoch": 4,
        "args/lr": 0.5,
        "args/path": "/a/b",
        "args/dtype": "torch.bfloat16",
        "scheduler/last_epoch": 3,
        "numpy/position": 1,
        "none": None,
    }
    assert {item.name: item.reason for item in source.left_out} == {
        "class": "it has the name torch.nn.modules.linear.Linear, which JSON has not",
        "sparse": "it has an object of torch._utils._rebuild_sparse_tensor, which JSON has not",
    }


def test_model_pickled_as_an_object_is_read_without_its_class(tmp_path: Path) -> None:
    net = Net()
    source = opened(tmp_path, net)
    expected = net.state_dict()
    assert set(source.tensors) == {f"model/{name}" for name in expected} - {"model/head.weight"}
    for name in ("embedding.weight", "layer.bias"):
        np.testing.assert_array_equal(tensor_of(source, f"model/{name}"), expected[name].numpy())


def optimizer_of(groups: list[dict[str, Any]]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for group in groups:
        for entry in group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            parameter.grad = torch.full_like(parameter, parameter.numel())
    optimizer.step()
    return optimizer.state_dict()


def test_numbered_parameters_without_names_are_left_out(tmp_path: Path) -> None:
    """Groups order parameters otherwise than the module does: a guess would mix up moments."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    state = {"model": {"a": a, "b": b}}
    state["optimizer"] = optimizer_of([{"params": [b]}, {"params": [a], "lr": 0.2}])
    source = opened(tmp_path, state)
    assert set(source.tensors) == {"model/a", "model/b"}
    assert [(item.name, "numbered" in item.reason) for item in source.left_out] == [
        ("optimizer", True)
    ]
    named = opened(tmp_path, state, parameter_names=["b", "a"])
    assert tensor_of(named, "optim/b/momentum_buffer").tolist() == [[4, 4], [4, 4]]
    assert tensor_of(named, "optim/a/momentum_buffer").tolist() == [2, 2]
    assert [
        (group["parameters"], group["options"]["lr"]) for group in named.documents["optim/groups"]
    ] == [(["b"], 0.1), (["a"], 0.2)]
    with pytest.raises(CheckpointDamaged, match="2 parameters, and 1 names"):
        opened(tmp_path, state, parameter_names=["b"])


def test_two_groups_of_equal_shapes_are_not_guessed(tmp_path: Path) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    state = {"model": {"a": a, "b": b}, "optim": optimizer_of([{"params": [b]}, {"params": [a]}])}
    assert [item.name for item in opened(tmp_path, state).left_out] == ["optim"]


def test_names_that_the_optimizer_noted_are_taken(tmp_path: Path) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    groups = [{"params": [("b", b)]}, {"params": [("a", a)]}]
    state = {"model": {"a": a, "b": b}, "optimizer": optimizer_of(groups)}
    source = opened(tmp_path, state)
    assert tensor_of(source, "optim/a/momentum_buffer").tolist() == [2, 2]
    assert "param_names" not in source.documents["optim/groups"][0]["options"]


def test_two_parameters_of_one_shape_are_not_guessed(tmp_path: Path) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    state = {"model": {"a": a, "b": b}, "optim": optimizer_of([{"params": [a, b]}])}
    (left,) = opened(tmp_path, state).left_out
    assert (left.name, "--parameter-names" in left.reason) == ("optim", True)


def test_shapes_that_no_two_parameters_share_prove_the_order(tmp_path: Path) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    state = {"model": {"a": a, "b": b}, "optim": optimizer_of([{"params": [a, b]}])}
    source = opened(tmp_path, state)
    assert tensor_of(source, "optim/a/momentum_buffer").tolist() == [2, 2]
    assert source.left_out == ()


def test_order_of_parameters_without_state_need_not_be_known(tmp_path: Path) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    told = torch.optim.SGD([a, b], lr=0.5).state_dict()
    source = opened(tmp_path, {"model": {"a": a, "b": b}, "optim": told})
    assert source.left_out == ()
    assert source.documents["optim/groups"][0]["options"]["lr"] == 0.5


@pytest.mark.parametrize("differs", ["shape", "number"])
def test_one_group_is_named_only_if_the_model_agrees(tmp_path: Path, differs: str) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    model: dict[str, torch.Tensor] = {"a": a, "b": b}
    if differs == "number":
        model["buffer"] = torch.ones(1)
    order = [b, a] if differs == "shape" else [a, b]
    source = opened(tmp_path, {"model": model, "optim": optimizer_of([{"params": order}])})
    assert [item.name for item in source.left_out] == ["optim"]
    assert not any(key.startswith("optim/") for key in source.tensors)


def test_optimizer_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2)}}
    state["optimizer"] = {"state": {}, "param_groups": [{"lr": 1}]}
    with pytest.raises(CheckpointDamaged, match="no list of parameters"):
        opened(tmp_path, state)
    state["optimizer"] = {"state": {}, "param_groups": [{"params": ["a"]}, {"params": ["a"]}]}
    with pytest.raises(CheckpointDamaged, match="one parameter twice"):
        opened(tmp_path, state)
    state["optimizer"] = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    with pytest.raises(CheckpointDamaged, match="have one name"):
        opened(tmp_path, state, parameter_names=["a", "a"])
    state["optimizer"] = {"state": {7: {}}, "param_groups": [{"params": ["a"]}]}
    assert [item.name for item in opened(tmp_path, state).left_out] == ["optimizer.state.7"]


def test_numbers_as_keys_do_not_become_text(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(W)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
    source = opened(tmp_path, {"model": {"w": W}, "scheduler": scheduler.state_dict()})
    assert source.documents["values"]["scheduler/last_epoch"] == 0
    assert "scheduler/milestones" not in source.documents["values"]
    assert [(item.name, item.reason) for item in source.left_out] == [
        ("scheduler/milestones", "it has a value of type int as a key, which JSON has not")
    ]


@pytest.mark.parametrize("noted", [5, "ab", {"a": 1}])
def test_noted_names_that_are_no_list_are_refused(tmp_path: Path, noted: object) -> None:
    group = {"params": [0], "param_names": noted}
    state = {"model": {"w": W}, "optimizer": {"state": {}, "param_groups": [group]}}
    with pytest.raises(CheckpointDamaged, match="param_names of a group of its optimizer are no"):
        opened(tmp_path, state)
    group["param_names"] = None
    assert opened(tmp_path, state).documents["optim/groups"][0]["parameters"] == ["w"]


def test_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    args = argparse.Namespace()
    args.first = args.second = args
    with pytest.raises(CheckpointDamaged, match=r"args/.*deep, or contains itself"):
        opened(tmp_path, {"model": {"w": W}, "args": args})


def test_bytes_repeated_by_many_tensors_are_refused(tmp_path: Path) -> None:
    one = torch.ones(1)
    state = {f"t{n}": one.expand(2**27 - n, 1) for n in range(3)}
    with pytest.raises(CheckpointDamaged, match=r"it\.pt: its \d+ bytes are repeated to tensors"):
        opened(tmp_path, state)
    del state["t2"]
    assert set(opened(tmp_path, state).tensors) == {"model/t0", "model/t1"}


def test_names_that_no_key_can_have_are_left_out(tmp_path: Path) -> None:
    source = opened(tmp_path, {"model": {"w": torch.ones(1), "..": torch.ones(1)}})
    assert [item.name for item in source.left_out] == ["model/.."]
    with pytest.raises(CheckpointDamaged, match="is a tensor, so"):
        opened(tmp_path, {"model": {"w": torch.ones(1), "w/v": torch.ones(1)}})


@pytest.mark.timeout(patient(30))
def test_shared_values_are_gone_over_once() -> None:
    value: list[Any] = []
    for _ in range(100):
        value = [value, value]
    assert not has_tensor(value)


def test_file_without_tensors_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatUnsupported, match="neither a state_dict"):
        opened(tmp_path, {"lr": 0.1})
    with pytest.raises(FormatUnsupported, match="a value of type list"):
        opened(tmp_path, [torch.ones(1)])
