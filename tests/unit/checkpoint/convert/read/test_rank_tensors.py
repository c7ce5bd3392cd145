"""Tensors that ranks have in files of their own: moved, compared and averaged by boxes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from keepstep.checkpoint.convert.read.arrays import Array, MemoryArray
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, Piece, assembled
from keepstep.checkpoint.convert.read.rank_tensors import (
    RankPart,
    ShardMerge,
    array_of_box,
    blocks,
    compared,
    joined,
    mean,
)
from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box, overlapping
from keepstep.checkpoint.format.layout.source import TensorSpec

Values = npt.NDArray[np.float32]


def numbers(*shape: int) -> Values:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def in_rows(values: Values, name: str) -> ForeignTensor:
    """Return a tensor of which each row is a piece of its own."""
    pieces = [
        Piece(
            Box((row, 0), (1, values.shape[1])),
            MemoryArray("float32", values[row : row + 1], f"{name} row {row}"),
        )
        for row in range(len(values))
    ]
    return assembled("w", TensorSpec("float32", values.shape), pieces)


def read(array: Array, box: Box) -> Values:
    into = np.full(box.shape, np.nan, np.float32)
    array.read_into(box, into)
    return into


def test_pieces_of_ranks_become_pieces_of_the_whole() -> None:
    values = numbers(4, 6)
    ranks = {n: in_rows(values[:, 3 * n : 3 * n + 3], f"rank {n}") for n in (0, 1)}
    parts = tuple(RankPart(n, Box((0, 0), (4, 3)), Box((0, 3 * n), (4, 3))) for n in (0, 1))
    whole = joined("w", ShardMerge((4, 6), parts), ranks)
    assert len(whole.pieces) == 8
    array = array_of_box("w", whole, Box((1, 1), (3, 4)))
    assert np.array_equal(read(array, Box((1, 1), (2, 2))), values[2:4, 2:4])
    assert array.location == "rank 0 row 1"
    assert np.array_equal(
        read(array.narrow(Box((1, 0), (2, 4))), Box((1, 3), (1, 1))), values[3:4, 4:5]
    )


def test_copies_are_compared_in_the_box_that_is_read() -> None:
    values = numbers(3, 4)
    other = values.copy()
    other[1, 1] = -1
    array = compared(
        "w", tuple(MemoryArray("float32", v, n) for v, n in ((values, "a"), (other, "b")))
    )
    assert np.array_equal(read(array, Box((1, 2), (2, 2))), values[1:, 2:])
    assert np.array_equal(read(array.narrow(Box((0, 2), (3, 2))), Box((2, 0), (1, 1))), [[10]])
    with pytest.raises(CheckpointDamaged, match="b: its w is not that of a, and is to be a copy"):
        read(array, Box((1, 1), (1, 1)))


def test_bits_are_compared_not_numbers() -> None:
    nan, zeros = np.full((2,), np.nan, np.float32), np.zeros((2,), np.float32)
    assert np.isnan(read(compared("w", _twice(nan, nan)), Box((0,), (2,)))).all()
    with pytest.raises(CheckpointDamaged):
        read(compared("w", _twice(zeros, -zeros)), Box((0,), (2,)))


def _twice(first: Values, other: Values) -> tuple[MemoryArray, MemoryArray]:
    return (MemoryArray("float32", first, "a"), MemoryArray("float32", other, "b"))


def test_mean_is_that_of_the_box_that_is_read() -> None:
    values = numbers(3, 4)
    array = mean(_twice(values, values + 3))
    assert np.array_equal(read(array, Box((1, 2), (2, 2))), values[1:, 2:] + 1.5)
    assert np.array_equal(read(array.narrow(Box((2, 0), (1, 4))), Box((0, 3), (1, 1))), [[12.5]])
    narrow = mean(_twice(values, values + 1), "bfloat16")
    assert narrow.dtype == "bfloat16"


def test_blocks_are_disjoint_and_cover_what_is_read() -> None:
    found = list(blocks((3, 5, 7), 4, 64))
    assert overlapping(found) is None
    assert sum(box.size for box in found) == 3 * 5 * 7
    assert max(box.size for box in found) <= 16
    assert list(blocks((2, 3), 4)) == [Box.whole((2, 3))]
    assert [box.size for box in blocks((2,), 8, 4)] == [1, 1]
    assert list(blocks((), 4)) == [Box((), ())]


def test_large_copies_are_compared_block_by_block() -> None:
    values = numbers(3, 2**19)
    other = values.copy()
    array = compared("w", _twice(values, other))
    assert np.array_equal(read(array, Box((1, 1), (2, 2**19 - 1))), values[1:, 1:])
    other[2, -1] = 0
    with pytest.raises(CheckpointDamaged):
        read(array, Box((1, 1), (2, 2**19 - 1)))


def test_ranks_that_do_not_cover_the_tensor_are_refused() -> None:
    tensor = in_rows(numbers(2, 2), "rank 0")
    part = RankPart(0, Box((0, 0), (2, 2)), Box((0, 0), (2, 2)))
    with pytest.raises(CheckpointDamaged, match="only 4 of them"):
        joined("w", ShardMerge((2, 3), (part,)), {0: tensor})
