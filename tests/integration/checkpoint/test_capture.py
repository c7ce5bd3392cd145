"""Tests of capturing live state repeatedly while it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


def fill_empty_buffer(model: Tied, optimizer: torch.optim.AdamW) -> None:
    model.norm.later = torch.full((6,), 7.0)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (move_data, "model/norm.bias"),
        (replace_buffer, "model/norm.running_mean"),
        (replace_slot, "optim/norm.bias/exp_avg"),
        (add_slot, "optim/norm.bias/extra"),
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
