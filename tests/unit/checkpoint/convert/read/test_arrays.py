"""Views of arrays in files are what NumPy's views are, and never reach beyond their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.read.arrays import (
    FileArray,
    MemoryArray,
    contiguous_strides,
    dense_parts,
)
from keepstep.checkpoint.convert.read.files import Extent
from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from tests.unit.checkpoint.convert.read.written import extent_of

SIZE = 240


@pytest.fixture(scope="module")
def extent(tmp_path_factory: pytest.TempPathFactory) -> Extent:
    # The elements begin at an odd byte: nothing aligns them in a safetensors file.
    content = b"xyz" + np.arange(SIZE, dtype=np.float32).tobytes() + b"!"
    whole = extent_of(tmp_path_factory.mktemp("arrays"), content)
    return whole.part(3, 4 * SIZE)


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box, list[int]]:
    """Draw a shape of SIZE elements or fewer, an order of its axes, and a box and shape to view."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    if math.prod(shape) > SIZE:
        shape = shape[:2]
    axes = tuple(draw(st.permutations(range(len(shape)))))
    starts = [draw(st.integers(0, shape[axis])) for axis in axes]
    stops = [
        draw(st.integers(start, shape[axis])) for start, axis in zip(starts, axes, strict=True)
    ]
    extents = tuple(b - a for a, b in zip(starts, stops, strict=True))
    wanted = list(draw(st.permutations(_factors(math.prod(extents)))))
    return shape, axes, Box(tuple(starts), extents), wanted


def _factors(number: int) -> list[int]:
    factors = [1]
    for prime in (2, 3, 5):
        while number and number % prime == 0:
            factors.append(prime)
            number //= prime
    return [*factors, number]


@given(shapes_and_boxes(), st.integers(4, 64), st.integers(0, 32))
def test_views_are_numpys(
    extent: Extent,
    drawn: tuple[tuple[int, ...], tuple[int, ...], Box, list[int]],
    most_nbytes: int,
    gap_nbytes: int,
) -> None:
    shape, axes, box, wanted = drawn
    start = min(5, SIZE - math.prod(shape))
    array = FileArray(extent, "float32", shape, contiguous_strides(shape), start)
    expected: npt.NDArray[Any] = np.arange(SIZE, dtype=np.float32)[array.start :][: array.size]
    expected = expected.reshape(shape).transpose(axes)
    viewed = permuted(array, axes)
    np.testing.assert_array_equal(viewed.read(), expected)
    into = np.zeros(box.shape, np.float32)
    viewed.read_into(box, into)
    narrowed = viewed.narrow(box)
    expected = expected[box.slices]
    np.testing.assert_array_equal(into, expected)
    assert narrowed.is_contiguous == (expected.flags.c_contiguous or not expected.size)
    parts = np.full(box.shape, -1, np.float32)
    for part_box, part in dense_parts(narrowed, most_nbytes, gap_nbytes):
        assert part.span_nbytes <= most_nbytes
        assert (parts[part_box.slices] == -1).all()
        parts[(*part_box.slices, ...)] = part.read()
    np.testing.assert_array_equal(parts, expected)
    try:
        reshaped = narrowed.reshaped(wanted)
    except ValueError:
        # NumPy copies where there is no view.
        with pytest.raises((AttributeError, ValueError)):
            expected.view().shape = tuple(wanted)
    else:
        np.testing.assert_array_equal(reshaped.read(), expected.reshape(wanted))


def permuted(array: FileArray, axes: Sequence[int]) -> FileArray:
    """Return an array with its dimensions in this order, as a file may have it."""
    return replace(
        array,
        shape=tuple(array.shape[axis] for axis in axes),
        strides=tuple(array.strides[axis] for axis in axes),
    )


def test_part_of_many_rows_is_read_in_few_reads(extent: Extent) -> None:
    column = FileArray(extent, "float32", (24, 10), (10, 1)).narrow(Box((0, 3), (24, 1)))
    assert len(list(dense_parts(column, gap_nbytes=36))) == 1
    assert len(list(dense_parts(column, gap_nbytes=35))) == 24
    assert len(list(dense_parts(column, most_nbytes=84, gap_nbytes=36))) == 8


def test_layer_of_a_stack_and_range_of_a_flat_buffer(extent: Extent) -> None:
    stack = FileArray.contiguous(extent, "float32", (4, 5, 12))
    expected = np.arange(SIZE, dtype=np.float32).reshape(4, 5, 12)
    layer = Box((2, 0, 0), (1, 5, 12))
    np.testing.assert_array_equal(stack.narrow(layer).reshaped((5, 12)).read(), expected[2])
    np.testing.assert_array_equal(stack.flat_range(59, 61).read(), [59, 60])
    with pytest.raises(ValueError, match="cannot be viewed"):
        permuted(stack, (2, 1, 0)).flat_range(0, 5)


@pytest.mark.parametrize("box", [Box((4,), (1,)), Box((0, 0), (1, 1)), Box((3,), (2,))])
def test_view_of_what_is_not_there_is_refused(extent: Extent, box: Box) -> None:
    with pytest.raises(ValueError, match="does not have"):
        FileArray(extent, "float32", (4,), (1,)).narrow(box)


@pytest.mark.parametrize(
    ("shape", "strides", "start"),
    [
        ((SIZE + 1,), (1,), 0),
        ((SIZE,), (1,), 1),
        ((2, 2), (SIZE - 1, 1), 1),
        ((2,), (SIZE,), 0),
        ((2**62,), (0,), 0),
        ((2**20, 2**20, 2**20), (0, 0, 0), 0),
        ((2**30,), (0,), 0),
        ((-1,), (1,), 0),
        ((2,), (-1,), 5),
        ((2,), (1,), -1),
        ((2,), (1, 1), 0),
        ((2.0,), (1,), 0),
        (("2",), (1,), 0),
        ((True,), (1,), 0),
        ((1,) * 33, (1,) * 33, 0),
        ((10**2000,), (1,), 0),
    ],
)
def test_array_that_reaches_beyond_its_bytes_is_refused(
    extent: Extent, shape: Any, strides: Any, start: int
) -> None:
    with pytest.raises(CheckpointDamaged, match="file at byte 3"):
        FileArray(extent, "float32", shape, strides, start)


def test_expanded_tensor_and_empty_one_are_read(extent: Extent) -> None:
    assert FileArray(extent, "float32", (3, 2), (0, 1), 4).read().tolist() == [[4, 5]] * 3
    assert FileArray(extent, "float32", (0, 7), (7, 1), 10**6).read().shape == (0, 7)


def test_file_that_shrank_is_told(tmp_path: Path) -> None:
    extent = extent_of(tmp_path, bytes(64))
    array = FileArray.contiguous(extent, "float32", (16,))
    (tmp_path / "file").write_bytes(bytes(40))
    with pytest.raises(CheckpointDamaged, match="ended at byte 40, though it had 64"):
        array.read()


def test_contiguous_array_has_exactly_its_bytes(extent: Extent) -> None:
    with pytest.raises(CheckpointDamaged, match=r"has 956 bytes, and 960 are stored"):
        FileArray.contiguous(extent, "float32", (SIZE - 1,))


def test_array_in_memory_is_narrowed_without_copy() -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3)
    array = MemoryArray("int64", values, "here").narrow(Box((1, 0), (1, 2)))
    into = np.zeros((1, 2), np.int64)
    values[1, 1] = 9
    array.read_into(Box.whole((1, 2)), into)
    assert into.tolist() == [[3, 9]]
