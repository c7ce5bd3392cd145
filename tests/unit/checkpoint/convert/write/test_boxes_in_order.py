"""Tests of reading in order: whatever the memory, the boxes are the tensor, one after the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.format.layout.source import TensorSpec


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 600))
def test_boxes_one_after_the_other_are_the_tensor(shape: list[int], most_nbytes: int) -> None:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    boxes = list(boxes_in_order(TensorSpec("float32", tuple(shape)), most_nbytes))
    read = [values[box.slices].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([*read, np.empty(0, np.float32)]), values.reshape(-1))
    assert all(4 * box.size <= max(4, most_nbytes) for box in boxes)


def test_memory_is_used_up() -> None:
    assert len(list(boxes_in_order(TensorSpec("float32", (100, 10)), 800))) == 5
    assert len(list(boxes_in_order(TensorSpec("float32", (4, 100)), 200))) == 8
