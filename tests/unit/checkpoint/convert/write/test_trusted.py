"""Tests of the tensors taken out of a trusted file's objects, and of the report on the rest."""

from __future__ import annotations

from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from keepstep.checkpoint.convert.write.trusted import code_in
from keepstep.checkpoint.convert.write.trusted_load import PlainValues
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.location import Format, Location
from tests.opened_checkpoints import open_foreign


class Stage(IntEnum):
    FIRST = 1


class Side(Enum):
    LEFT = "left"


class Text(str):
    __slots__ = ()


class Opaque:
    pass


def test_keys_are_those_that_the_file_alone_would_give(tmp_path: Path) -> None:
    content = {
        "ema": {
            key: torch.full((2,), place)
            for place, key in enumerate((("a", 1), None, 1.5, b"b", True, 7, "t", ("c", (2.5,))))
        }
    }
    values = PlainValues()
    torch.save(content, tmp_path / "plain.pt")
    torch.save(values.of(content, ""), tmp_path / "taken.pt")
    assert values.left_out == []
    plain, taken = (open_foreign(str(tmp_path / f"{name}.pt")) for name in ("plain", "taken"))
    assert len(plain.tensors) == 8
    assert taken.tensors.keys() == plain.tensors.keys()
    assert "ema/('a', 1)" in taken.tensors


def test_keys_of_other_types_are_made_plain() -> None:
    values = PlainValues()
    of = values.of({Stage.FIRST: 1, Side.LEFT: 2, np.int64(3): 3, Text("t"): 4}, "")
    assert of == {1: 1, "left": 2, 3: 3, "t": 4}
    assert {type(key) for key in of} == {int, str}
    assert values.left_out == []


def test_entries_whose_keys_cannot_be_carried_are_named() -> None:
    values = PlainValues()
    state = {Opaque(): 1, torch.ones(2): 2, torch.zeros(1): 3, 2**70: 4, Side.LEFT: 5, "left": 6}
    assert values.of({"state": state}, "") == {"state": {2**70: 4, "left": 5}}
    module = Opaque.__module__
    assert values.left_out == [
        ("state/left", "another entry has this key"),
        (f"state/{module}.Opaque", "1 of its keys are such, and cannot be carried"),
        ("state/torch.Tensor", "2 of its keys are such, and cannot be carried"),
    ]


def test_file_from_before_torch_1_6_needs_no_trust(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert open_foreign(str(path)).tensors.keys() == {"model/w"}
    with pytest.raises(FormatUnsupported, match=r"old\.pt.*before torch 1\.6.*leave out --trust"):
        code_in(Location(str(path), Format.TORCH_SAVE))
