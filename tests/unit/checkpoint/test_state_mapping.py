"""Claims about the mapping that users save and load: what it holds is described as one state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keepstep.checkpoint import Descriptions, Scale
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.state_mapping import capture

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
