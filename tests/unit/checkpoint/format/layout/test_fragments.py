"""Tests of flat ranges: their boxes hold exactly their elements, in order."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.fragments import boxes_of_range
from tests.examples import examples


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@settings(max_examples=examples(200))
@given(ranges())
def test_the_boxes_of_a_range_hold_its_elements_in_order(case) -> None:
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    elements = np.arange(math.prod(shape)).reshape(shape)
    held = [number for box in boxes for number in elements[box.slices].reshape(-1)]
    assert held == list(range(start, stop))
    assert all(box.size for box in boxes)
    assert all(one.intersect(other) is None for one, other in combinations(boxes, 2))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_range_of_whole_rows_is_one_box() -> None:
    assert boxes_of_range((4, 1, 3), 3, 9) == (Box((1, 0, 0), (2, 1, 3)),)
    assert boxes_of_range((), 0, 1) == (Box((), ()),)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="has 6 elements"):
        boxes_of_range((2, 3), start, stop)
