"""Tests of live tensors of which this rank has several boxes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, overlapping
from keepstep.checkpoint.live.digest import checksums
from keepstep.checkpoint.live.flat_fragment import FlatFragment
from keepstep.checkpoint.live.tensors import LiveTensor, check_disjoint

boxes = st.builds(
    lambda offset, shape: Box(tuple(offset), tuple(shape)),
    st.tuples(st.integers(0, 6), st.integers(0, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)


def live(key: str, offset: int, values: list[float]) -> LiveTensor:
    data = torch.tensor(values)
    return LiveTensor(key, (10,), Box((offset,), (len(values),)), data)


@given(st.lists(boxes, max_size=6))
def test_overlaps_are_found_among_any_boxes(held: list[Box]) -> None:
    expected = any(one.intersect(other) for one, other in itertools.combinations(held, 2))
    pair = overlapping(held)
    assert (pair is not None) == expected
    assert pair is None or pair[0].intersect(pair[1]) is not None


def test_boxes_of_different_elements_are_one_state() -> None:
    check_disjoint([live("w", 0, [1.0, 2.0]), live("w", 2, [3.0]), live("v", 0, [4.0])])


def test_boxes_that_overlap_are_refused_by_name() -> None:
    with pytest.raises(LayoutMismatch, match=r"w is in the state in boxes that overlap"):
        check_disjoint([live("w", 0, [1.0, 2.0]), live("w", 1, [2.0])])


def test_the_same_box_twice_is_a_name_used_twice() -> None:
    other_shape = LiveTensor("w", (3,), Box((2,), (1,)), torch.zeros(1))
    for second in (live("w", 0, [5.0, 6.0]), other_shape):
        with pytest.raises(LayoutMismatch, match="w is in the state twice"):
            check_disjoint([live("w", 0, [1.0, 2.0]), second])


def test_every_box_of_a_tensor_counts_in_its_checksum() -> None:
    sums = [
        checksums([live("w", 0, [first]), live("w", 5, [last])])["w"]
        for first, last in [(1.0, 2.0), (1.0, 3.0), (0.0, 2.0)]
    ]
    assert len(set(sums)) == 3


def test_moved_memory_is_noticed_at_every_box_of_a_flat_fragment() -> None:
    buffer = torch.arange(10.0)
    tensors = FlatFragment(buffer, (5, 4), 3).describe("w")
    whole = np.full((5, 4), -1.0)
    for tensor in tensors:
        whole[tensor.box.slices] = tensor.data.numpy()
    assert whole.reshape(-1)[3:13].tolist() == list(range(10))
    assert len(tensors) == 3
    assert not any(tensor.has_moved for tensor in tensors)
    buffer.data = buffer.clone()
    assert all(tensor.has_moved for tensor in tensors)


@pytest.mark.parametrize(
    ("tensor", "start"),
    [
        (torch.zeros(2, 3), 0),
        (torch.zeros(12)[::2], 0),
        (torch.zeros(6), 7),
        (torch.zeros(6), -1),
    ],
)
def test_a_fragment_that_is_no_range_of_the_tensor_is_refused(
    tensor: torch.Tensor, start: int
) -> None:
    with pytest.raises(LayoutMismatch, match=r"flat fragment"):
        FlatFragment(tensor, (3, 4), start)
