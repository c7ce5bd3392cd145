"""Claims about how the cells of a chunk are encoded."""

from __future__ import annotations

import itertools

import crc32c
import numpy as np
import pytest

from keepstep.checkpoint.stored.cell_codec import encode_cells, encoded_nbytes
from keepstep.checkpoint.stored.chunking import StoredTensor


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
    ],
)
def test_each_cell_is_padded_and_followed_by_its_checksum(
    shape: tuple[int, ...], cell: tuple[int, ...]
) -> None:
    """The same whether a chunk is one whole cell, as of most tensors, or several."""
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


def test_what_is_encoded_does_not_change_with_the_values_afterwards() -> None:
    """Who gave them gives other values in the same memory next."""
    tensor = StoredTensor(dtype="uint8", shape=(9,), chunk=(9,), cell=(9,), is_packed=True)
    values = np.arange(9, dtype=np.uint8).reshape(9, 1)
    encoded = encode_cells(tensor, values, np.empty(9 + 4, np.uint8))
    values[...] = 0
    assert bytes(encoded.data[:9]) == bytes(range(9))
