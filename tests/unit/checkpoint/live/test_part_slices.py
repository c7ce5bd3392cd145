"""Claims about the parts of fused tensors: they are stored, and no other order is loaded."""

from __future__ import annotations

import uuid

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint import Descriptions, Part, PartTable
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage

GATE_UP = PartTable(0, (Part("gate", 4), Part("up", 4)))
UP_GATE = PartTable(0, (Part("up", 4), Part("gate", 4)))
SHARED = PartTable(0, (Part("gate", 4, 2), Part("up", 4, 2)))
PARTS = {"fused.weight": GATE_UP, "extra/fused": GATE_UP}


@pytest.fixture
def url() -> str:
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, state(), step=1, descriptions=Descriptions(parts=PARTS))
    return url


def state() -> dict[str, object]:
    torch.manual_seed(0)
    return {
        "model": nn.ModuleDict({"fused": nn.Linear(3, 8), "plain": nn.Linear(3, 8)}),
        "extra": {"fused": torch.randn(8, 2), "plain": torch.randn(8, 2)},
    }


def test_parts_of_fused_tensors_are_stored_by_name(url: str) -> None:
    parts = StoredCheckpoint.open(open_storage(url)).documents["parts"]
    assert parts == dict.fromkeys(("model/fused.weight", "extra/fused"), GATE_UP.to_json())


@pytest.mark.parametrize("name", ["fused.weight", "extra/fused"])
def test_another_order_of_parts_is_refused(url: str, name: str) -> None:
    with pytest.raises(
        LayoutMismatch,
        match=rf"{name}: is stored with the parts \[gate 4, up 4\] .* with \[up 4, gate 4\]",
    ):
        checkpoint.load(url, state(), descriptions=Descriptions(parts={name: UP_GATE}))


@pytest.mark.parametrize("parts", [{}, PARTS, dict.fromkeys(PARTS, SHARED)])
def test_the_same_order_is_loaded_and_none_need_be_told(
    url: str, parts: dict[str, PartTable]
) -> None:
    assert checkpoint.load(url, state(), descriptions=Descriptions(parts=parts)) == 1


def test_a_state_without_fused_tensors_has_no_such_document() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, state(), step=1)
    assert "parts" not in StoredCheckpoint.open(open_storage(url)).documents
