"""Tests of the read planner: each wanted element is read once, from the earliest source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.planner import plan_reads

KEY = "model/weight"


def entry_of(key: str, shape: tuple[int, ...], box: Box) -> Entry:
    return Entry(
        key=key, dtype="uint8", global_shape=shape, box=box, byte_offset=0, nbytes=box.size
    )


def index_of(shape: tuple[int, ...], *boxes: Box) -> ShardIndex:
    return ShardIndex(0, tuple(entry_of(KEY, shape, box) for box in boxes), {})


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that partition a tensor: cut at random, recursively; some are empty."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        if not shape:
            break
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[axis]))
        first, second, start = list(box.shape), list(box.shape), list(box.offset)
        first[axis], second[axis], start[axis] = cut, box.shape[axis] - cut, box.offset[axis] + cut
        boxes += [Box(box.offset, tuple(first)), Box(tuple(start), tuple(second))]
    return boxes


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[ShardIndex], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    sources = []
    for _ in range(draw(st.integers(1, 3))):  # Replicas, each cut in its own way.
        boxes = draw(st.permutations(draw(partitions(shape))))
        cut = draw(st.integers(0, len(boxes)))
        sources += [index_of(shape, *boxes[:cut]), index_of(shape, *boxes[cut:])]
    wanted = draw(partitions(shape)) + draw(partitions(shape))
    return shape, sources, wanted


@given(cases())
def test_every_wanted_element_is_read_exactly_once_from_the_earliest_source(case) -> None:
    shape, sources, wanted = case
    earliest = np.full(shape, len(sources))
    for number, source in reversed(list(enumerate(sources))):
        for entry in source.entries:
            earliest[entry.box.slices] = number
    counts = [np.zeros(shape, int) for _ in wanted]
    for read in plan_reads([(KEY, box) for box in wanted], sources):
        assert read.entry in sources[read.source].entries
        assert (
            read.box.intersect(read.entry.box)
            == read.box
            == read.box.intersect(wanted[read.wanted])
        )
        assert (earliest[read.box.slices] == read.source).all()
        counts[read.wanted][read.box.slices] += 1
    for box, count in zip(wanted, counts, strict=True):
        expected = np.zeros(shape, int)
        expected[box.slices] = 1
        assert (count == expected).all()


def test_a_missing_part_is_reported_with_its_tensor_and_box() -> None:
    with pytest.raises(LayoutMismatch, match=r"model/weight: .*offset \(2, 0\), shape \(2, 3\)"):
        plan_reads([(KEY, Box.whole((4, 3)))], [index_of((4, 3), Box((0, 0), (2, 3)))])


def test_planning_a_thousand_tensors_of_sixty_four_shards_is_linear() -> None:
    def shard(rank: int) -> ShardIndex:
        box = Box((rank * 2, 0), (2, 4))
        return ShardIndex(0, tuple(entry_of(f"t{i}", (128, 4), box) for i in range(1000)), {})

    wanted = [(f"t{i}", Box((6, 0), (4, 4))) for i in range(1000)]
    assert len(plan_reads(wanted, [shard(rank) for rank in range(64)])) == 2000
