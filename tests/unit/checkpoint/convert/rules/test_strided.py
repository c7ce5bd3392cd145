"""Views copied between arrays: whole tensors, boxes of them, and arrays in any strides."""

from __future__ import annotations

import numpy as np
import pytest

from keepstep.checkpoint.convert.rules.presets import HUB, preset
from keepstep.checkpoint.convert.rules.strided import copy_view
from keepstep.checkpoint.convert.rules.views import box_view
from keepstep.checkpoint.format.layout.boxes import Box
from tests.unit.checkpoint.convert.rules.arrays import made
from tests.unit.checkpoint.convert.rules.models import BY_NAME, checkpoint_of


@pytest.mark.parametrize(
    ("model", "spelling"),
    [("llama", "megatron"), ("llama", "torchtitan"), ("gpt2", "megatron"), ("mixtral", "megatron")],
)
def test_copied_views_are_the_tensors_of_the_plan(model: str, spelling: str) -> None:
    small = BY_NAME[model]
    specs, arrays = checkpoint_of(small)
    plan = preset(small.family).plan(HUB, spelling, specs, small.config)
    for key, expected in made(plan, arrays).items():
        whole = np.full(expected.shape, -1, expected.dtype)
        for view in plan.tensors[key].views:
            # The source lies in memory in another order than its dimensions.
            source = None if view.source is None else arrays[view.source].copy(order="F")
            copy_view(view, whole, source)
        assert np.array_equal(whole, expected), key


def test_boxes_of_tensors_are_copied_between() -> None:
    small = BY_NAME["llama"]
    specs, arrays = checkpoint_of(small)
    plan = preset(small.family).plan(HUB, "megatron", specs, small.config)
    key = "model/decoder.layers.1.self_attention.linear_qkv.weight"
    expected = made(plan, arrays)[key]
    box = Box((5, 3), (30, 7))
    part = np.full(box.shape, -1, expected.dtype)
    for view in plan.tensors[key].views_in(box):
        assert view.source is not None
        read = arrays[view.source][view.source_box.slices]
        copy_view(view, part, read, target_origin=box.offset, source_origin=view.source_box.offset)
    assert np.array_equal(part, expected[box.slices])


def test_array_that_does_not_contain_the_view_is_refused() -> None:
    view = box_view("w", Box((2,), (3,)), Box((0,), (3,)))
    target, source = np.zeros(5), np.ones(3)
    copy_view(view, target, source)
    assert target.tolist() == [0, 0, 1, 1, 1]
    for wrong in (np.zeros(4), np.zeros((5, 1))):
        with pytest.raises(ValueError, match="does not contain"):
            copy_view(view, wrong, source)
    with pytest.raises(ValueError, match="does not contain"):
        copy_view(view, target, source, source_origin=(1,))
    with pytest.raises(ValueError, match="no array of it is given"):
        copy_view(view, target, None)
