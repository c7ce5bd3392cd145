"""Claims about how the cells of a chunk are encoded."""

from __future__ import annotations

import itertools
import math

import crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.format.stored import cell_codec
from keepstep.checkpoint.format.stored.cell_codec import decompress, encode_cells, encoded_nbytes
from keepstep.checkpoint.format.stored.chunking import StoredTensor
from tests.examples import examples


@pytest.mark.parametrize("is_banded", [False, True])
@pytest.mark.parametrize(
    ("shape", "cell"),
    [
        ((), ()),
        ((5,), (5,)),
        ((5,), (3,)),
        ((6, 4), (6, 4)),
        ((6, 4), (3, 4)),
        ((6, 4), (6, 3)),
        ((40, 50), (40, 50)),
        ((7, 3, 2), (2, 3, 2)),
        ((8, 9), (4, 3)),
        ((8, 6, 4), (4, 3, 2)),
        ((4, 8, 6), (1, 4, 3)),
        ((4, 8, 6), (2, 4, 3)),
        ((0, 3), (2, 3)),
        ((3, 0), (3, 1)),
    ],
)
def test_each_cell_is_padded_and_followed_by_its_checksum(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], cell: tuple[int, ...], is_banded: bool
) -> None:
    """The same whether a chunk is one whole cell, as of most tensors, or several."""
    if is_banded:
        narrow_bands(monkeypatch)
    tensor = StoredTensor(dtype="float32", shape=shape, chunk=shape, cell=cell, is_packed=True)
    values = np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8)
    counts = [-(-extent // step) for extent, step in zip(shape, cell, strict=True)]
    padded_shape = [count * step for count, step in zip(counts, cell, strict=True)]
    padded = np.zeros((*padded_shape, 4), np.uint8)
    padded[tuple(slice(0, extent) for extent in shape)] = values
    cells = [
        padded[
            tuple(slice(n * step, (n + 1) * step) for n, step in zip(place, cell, strict=True))
        ].tobytes()
        for place in itertools.product(*map(range, counts))
    ]
    checksums = [crc32c.crc32c(content) for content in cells]

    memory = np.full(encoded_nbytes(tensor, shape), 0xFF, np.uint8)

    encoded = encode_cells(tensor, values, memory)

    assert bytes(encoded.data) == b"".join(
        content + checksum.to_bytes(4, "little")
        for content, checksum in zip(cells, checksums, strict=True)
    )
    assert encoded.checksums == tuple(checksums)
    assert encoded.sizes == tuple(len(content) + 4 for content in cells)
    assert bytes(memory) == bytes(encoded.data)


def narrow_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have chunks encoded in bands of two floats, or row by row where a row has more."""
    monkeypatch.setattr(cell_codec, "_BAND_NBYTES", 8)


@pytest.mark.parametrize(
    ("shape", "cell", "bands"),
    [
        ((2**18,), (2**13,), 1),
        ((2**20,), (2**13,), 4),
        ((1024, 1024), (256, 128), 4),
        ((2048, 4096), (512, 128), 32),
        # Stacked matrices: of cells that have one of them, each is encoded on its own.
        ((2, 1024, 1024), (1, 256, 256), 8),
        ((2, 1, 1024, 1024), (1, 1, 256, 256), 8),
        # An odd extent has one cell of the whole chunk.
        ((3, 524289), (3, 524289), 3),
    ],
)
def test_chunk_is_encoded_in_bands_of_a_mebibyte_where_its_cells_allow_it(
    shape: tuple[int, ...], cell: tuple[int, ...], bands: int
) -> None:
    counts = [extent // step for extent, step in zip(shape, cell, strict=True)]
    values = np.empty((*shape, 4), np.uint8)
    into = np.empty((math.prod(counts), math.prod(cell) * 4), np.uint8)
    found = list(cell_codec._bands(values, counts, cell, into, 0))
    assert len(found) == bands
    assert sum(band.values.nbytes for band in found) == values.nbytes


def test_content_is_what_was_given_and_not_what_was_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a digest of contents finds elements that were encoded in other places."""
    tensor = StoredTensor(dtype="uint8", shape=(8, 8), chunk=(8, 8), cell=(4, 4), is_packed=False)
    values = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    in_order = cell_codec._cells_first
    monkeypatch.setattr(cell_codec, "_cells_first", lambda *taken: in_order(*taken)[..., ::-1, :])
    memory = np.empty(encoded_nbytes(tensor, (8, 8)), np.uint8)
    encoded = encode_cells(tensor, values, memory, with_content=True)
    assert bytes(encoded.data[:4]) == bytes([3, 2, 1, 0])
    assert encoded.content == crc32c.crc32c(values.data)


@given(
    axes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    edge=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    band=st.integers(1, 64),
    is_compressed=st.booleans(),
    is_contiguous=st.booleans(),
)
@settings(max_examples=examples(300))
def test_cells_and_content_are_those_of_the_chunk_whatever_the_bands(
    axes: list[tuple[int, int]],
    edge: list[int],
    band: int,
    is_compressed: bool,
    is_contiguous: bool,
) -> None:
    """Axes are cells and their extents; at its end a chunk lacks `edge` of them."""
    cell = tuple(extent for _, extent in axes)
    shape = tuple(
        max(1, count * extent - lacking)
        for (count, extent), lacking in zip(axes, edge, strict=False)
    )
    tensor = StoredTensor(
        dtype="int16",
        shape=shape,
        chunk=shape,
        cell=cell,
        is_packed=False,
        compression="zstd" if is_compressed else None,
    )
    around = np.random.default_rng(band).integers(0, 256, (*shape, 4), np.uint8)
    values = around[..., 1:3]
    if is_contiguous:
        values = np.ascontiguousarray(values)
    memory = np.empty(encoded_nbytes(tensor, shape), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cell_codec, "_BAND_NBYTES", band)
        encoded = encode_cells(tensor, values, memory, with_content=True)
    assert encoded.content == crc32c.crc32c(np.ascontiguousarray(values).data)
    decoded = np.zeros((*(-(-n // step) * step for n, step in zip(shape, cell, strict=True)), 2))
    ends = list(itertools.accumulate(encoded.sizes))
    counts = [-(-extent // step) for extent, step in zip(shape, cell, strict=True)]
    places = list(itertools.product(*map(range, counts)))
    for place, end, size, checksum in zip(
        places, ends, encoded.sizes, encoded.checksums, strict=True
    ):
        data = np.frombuffer(encoded.data[end - size : end - 4], np.uint8)
        assert crc32c.crc32c(data) == checksum
        if is_compressed:
            plain = np.empty(tensor.cell_nbytes, np.uint8)
            decompress(data, plain)
            data = plain
        box = tuple(slice(n * step, (n + 1) * step) for n, step in zip(place, cell, strict=True))
        decoded[box] = data.reshape(*cell, 2)
    inside = tuple(slice(0, extent) for extent in shape)
    assert np.array_equal(decoded[inside], values)
    assert decoded.sum() == values.sum(dtype=np.int64), "what is beyond the edge is zero"


def test_what_is_encoded_does_not_change_with_the_values_afterwards() -> None:
    """Who gave them gives other values in the same memory next."""
    tensor = StoredTensor(dtype="uint8", shape=(9,), chunk=(9,), cell=(9,), is_packed=True)
    values = np.arange(9, dtype=np.uint8).reshape(9, 1)
    encoded = encode_cells(tensor, values, np.empty(9 + 4, np.uint8))
    values[...] = 0
    assert bytes(encoded.data[:9]) == bytes(range(9))
