"""Tests of capturing live state repeatedly while it changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.live.capture import LiveStateReader
from tests.integration.checkpoint.tied import Tied, trained


def move_data(model: Tied, optimizer: torch.optim.AdamW) -> None:
    model.norm.bias.data = torch.full((6,), 7.0)


def replace_buffer(model: Tied, optimizer: torch.optim.AdamW) -> None:
    model.norm.running_mean = torch.full((6,), 7.0)


def replace_slot(model: Tied, optimizer: torch.optim.AdamW) -> None:
    optimizer.state[model.norm.bias]["exp_avg"] = torch.full((6,), 7.0)


def add_slot(model: Tied, optimizer: torch.optim.AdamW) -> None:
    optimizer.state[model.norm.bias]["extra"] = torch.full((6,), 7.0)


def clear_slots(model: Tied, optimizer: torch.optim.AdamW) -> None:
    optimizer.state.clear()
    step_to_seven(model, optimizer)


def load_optimizer(model: Tied, optimizer: torch.optim.AdamW) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_to_seven(model, optimizer)


def replace_slots(model: Tied, optimizer: torch.optim.AdamW) -> None:
    optimizer.state[model.norm.bias] = dict(optimizer.state[model.norm.bias])
    replace_slot(model, optimizer)


def step_to_seven(model: Tied, optimizer: torch.optim.AdamW) -> None:
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    optimizer.step()


def fill_empty_buffer(model: Tied, optimizer: torch.optim.AdamW) -> None:
    model.norm.later = torch.full((6,), 7.0)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (move_data, "model/norm.bias"),
        (replace_buffer, "model/norm.running_mean"),
        (replace_slot, "optim/norm.bias/exp_avg"),
        (add_slot, "optim/norm.bias/extra"),
        (clear_slots, "optim/norm.bias/exp_avg"),
        (load_optimizer, "optim/norm.bias/exp_avg"),
        (replace_slots, "optim/norm.bias/exp_avg"),
        (fill_empty_buffer, "model/norm.later"),
    ],
)
def test_a_capture_contains_tensors_that_replaced_others(change: Any, key: str) -> None:
    model, optimizer = trained(0)
    model.norm.register_buffer("later", None)
    reader = LiveStateReader(model, [optimizer])
    before = {tensor.key: tensor.data for tensor in reader.capture().tensors}
    assert before["model/embedding.weight"].data_ptr() == model.embedding.weight.data_ptr()
    assert key not in before or before[key][0] != 7
    change(model, optimizer)
    reader.invalidate_if_moved()
    after = {tensor.key: tensor.data for tensor in reader.capture().tensors}
    assert after[key].tolist() == [7.0] * 6


def test_a_capture_contains_the_groups_that_the_optimizer_has_now() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.norm.bias], lr=0.1)
    reader = LiveStateReader(model, [optimizer])

    def groups() -> list[tuple[list[str], float]]:
        stored = reader.capture().documents["optim/groups"]
        return [(group["parameters"], group["options"]["lr"]) for group in stored]

    assert groups() == [(["norm.bias"], 0.1)]
    optimizer.add_param_group({"params": [model.embedding.weight], "lr": 0.2})
    assert groups() == [(["norm.bias"], 0.1), (["embedding.weight"], 0.2)]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.3
    assert groups() == [(["norm.bias"], 0.3), (["embedding.weight"], 0.2)]
    optimizer.param_groups[1] = {**optimizer.param_groups[1], "lr": 0.4}
    assert groups() == [(["norm.bias"], 0.3), (["embedding.weight"], 0.4)]
    optimizer.param_groups[1]["params"].append(model.norm.weight)
    assert groups() == [(["norm.bias"], 0.3), (["embedding.weight", "norm.weight"], 0.4)]
    optimizer.param_groups[1]["params"].pop()
    optimizer.param_groups[0]["params"][0] = model.norm.weight
    assert groups() == [(["norm.weight"], 0.3), (["embedding.weight"], 0.4)]


def test_a_capture_contains_a_module_that_replaced_another() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.embedding.weight], lr=0.1)
    reader = LiveStateReader(model, [optimizer])
    reader.capture()
    model.norm = nn.BatchNorm1d(6)
    nn.init.constant_(model.norm.bias, 7.0)
    after = {tensor.key: tensor.data for tensor in reader.capture().tensors}
    assert after["model/norm.bias"].tolist() == [7.0] * 6


def test_a_capture_contains_a_buffer_of_a_module_that_had_no_tensors() -> None:
    model = nn.Sequential(nn.ReLU())
    reader = LiveStateReader(model, [])
    assert not reader.capture().tensors
    model[0].register_buffer("scale", torch.ones(1))
    assert [tensor.key for tensor in reader.capture().tensors] == ["model/0.scale"]


def test_a_walk_over_a_state_of_which_nothing_was_replaced_stays_valid() -> None:
    model, optimizer = trained(0)
    reader = LiveStateReader(model, [optimizer])
    reader.capture()
    optimizer.step()
    assert reader._scanned is not None
    assert reader._scanned.is_current
