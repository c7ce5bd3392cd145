"""Pieces make a tensor only if they are disjoint and cover it; errors name the files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.convert.read.arrays import FileArray, MemoryArray
from keepstep.checkpoint.convert.read.pieces import (
    Piece,
    assembled,
    first_of_each_box,
    pieces_of_range,
)
from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import TensorSpec
from tests.unit.checkpoint.convert.read.written import extent_of

SPEC = TensorSpec("float32", (4, 3))


def rows(start: int, stop: int, name: str = "file") -> Piece:
    values = np.zeros((stop - start, 3), np.float32)
    return Piece(Box((start, 0), values.shape), MemoryArray("float32", values, name))


def test_pieces_that_cover_a_tensor_make_it_and_empty_ones_are_dropped() -> None:
    tensor = assembled("w", SPEC, [rows(2, 4), rows(0, 2), rows(4, 4)])
    assert [piece.box.offset for piece in tensor.pieces] == [(2, 0), (0, 0)]


def test_gap_is_refused() -> None:
    with pytest.raises(CheckpointDamaged, match=r"w has shape \(4, 3\), 12 elements, and only 9"):
        assembled("w", SPEC, [rows(0, 2), rows(3, 4)])
    with pytest.raises(CheckpointDamaged, match="only 0 of them"):
        assembled("w", SPEC, [])


def test_overlap_is_refused_by_the_names_of_both_files() -> None:
    with pytest.raises(CheckpointDamaged, match=r"first: .* and second has .* overlaps"):
        assembled("w", SPEC, [rows(0, 3, "first"), rows(2, 4, "second")])


def test_replicas_are_taken_once() -> None:
    pieces = first_of_each_box([rows(0, 4, "first"), rows(0, 4, "second")])
    assert [piece.array.location for piece in pieces] == ["first"]


def test_piece_of_another_type_or_shape_or_outside_is_refused() -> None:
    for piece in (
        Piece(Box((0, 0), (4, 3)), MemoryArray("float64", np.zeros((4, 3)), "file")),
        Piece(Box((0, 0), (4, 3)), rows(0, 2).array),
        rows(3, 5),
    ):
        with pytest.raises(CheckpointDamaged, match="file: it has"):
            assembled("w", SPEC, [piece])


@given(
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    cut=st.integers(0, 64),
    padding=st.integers(0, 3),
)
def test_flat_partitions_make_the_tensor(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], cut: int, padding: int
) -> None:
    size = math.prod(shape)
    cut = min(cut, size)
    values = np.arange(size + padding, dtype=np.int32)
    extent = extent_of(tmp_path_factory.mktemp("flat"), values.tobytes())
    flat = FileArray.contiguous(extent, "int32", values.shape)
    pieces = [
        *pieces_of_range(shape, 0, flat.flat_range(0, cut)),
        *pieces_of_range(shape, cut, flat.flat_range(cut, size)),
    ]
    tensor = assembled("w", TensorSpec("int32", shape), pieces)
    read = np.full(shape, -1, np.int32)
    for piece in tensor.pieces:
        read[(*piece.box.slices, ...)] = piece.array.read()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(read, values[:size].reshape(shape))


def test_size_of_a_file_is_not_guessed(tmp_path: Path) -> None:
    extent = extent_of(tmp_path, bytes(10))
    with pytest.raises(CheckpointDamaged, match="12 bytes from 0 on, and it has 10"):
        extent.part(0, 12)
