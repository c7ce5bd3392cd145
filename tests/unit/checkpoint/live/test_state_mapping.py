"""Claims about the mapping that users save and load: what it holds is described as one state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint import Descriptions, Scale
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.live.state_mapping import capture

DESCRIPTIONS = Descriptions(scales={"weight": Scale("scales/weight", (2, 2), "bfloat16")})


def test_scales_beside_the_module_are_those_of_its_parameters() -> None:
    state = {"model": nn.Linear(2, 4), "scales": {"weight": torch.ones(2, 1)}}
    assert capture(state, DESCRIPTIONS).documents["scales"] == {
        "model/weight": {
            "scale": "scales/weight", "block_shape": [2, 2], "dtype": "bfloat16",
        }
    }  # fmt: skip


@pytest.mark.parametrize("state", [{}, {"scales": {"weight": torch.ones(3)}}])
def test_scales_that_are_nowhere_or_do_not_fit_are_refused(state: dict[str, object]) -> None:
    with pytest.raises(LayoutMismatch, match=r"scales: model/weight"):
        capture({"model": nn.Linear(2, 4), **state}, DESCRIPTIONS)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1}, "a/b": 2},
        {"a/b": 2, "a": {"b": torch.ones(2)}},
        {"a/b": torch.ones(2), "a": {"b": None}},
    ],
)
def test_a_value_whose_name_is_taken_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(LayoutMismatch, match=r"a/b is in the state twice; rename one"):
        capture(state)


def test_a_strict_load_refuses_a_checkpoint_that_lacks_a_value(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), {"x": torch.ones(4), "at": {"epoch": 7}}, step=1)
    x, at = torch.zeros(4), {"epoch": 0, "best": 0.5}
    state = {"x": x, "at": at}
    with pytest.raises(LayoutMismatch, match=r"at/best: a value that is missing in the source"):
        checkpoint.load(str(tmp_path), state)
    assert (x.tolist(), at) == ([0.0] * 4, {"epoch": 0, "best": 0.5})
    checkpoint.load(str(tmp_path), state, strict=False)
    assert (x.tolist(), at) == ([1.0] * 4, {"epoch": 7, "best": 0.5})
