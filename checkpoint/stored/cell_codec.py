"""Encodes and decodes the cells of chunks, as Zarr's codecs `bytes`, `blosc` and `crc32c` do. Pure.

Blosc puts the first bytes of all elements first, then all second ones and so on, and compresses the
result. Of a model's numbers, the bytes with signs and exponents shrink, and the others hardly do. A
cell is one of Blosc's blocks: in smaller ones zstd would find one code for all of an element's
bytes. Checksums cover the bytes as stored, so that who copies cells need not decode them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import crc32c
import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.layout.integers import ceil_div
from keepstep.checkpoint.stored.chunking import StoredTensor

Bytes = npt.NDArray[np.uint8]

CHECKSUM_NBYTES = 4

BLOSC_LEVEL = 1
BLOSC_HEADER_NBYTES = 16
"""What Blosc adds, and all that it adds to bytes that do not shrink."""

_BAND_NBYTES = 2**20
"""About how much of a chunk is read at a time: it stays in the processor's cache until the cells of
it have their checksums."""

_PART_NBYTES = 2**14
"""What such a band has of each cell at least."""


@dataclass(frozen=True, slots=True)
class EncodedCells:
    """The cells of a chunk, encoded, one after the other in C order.

    Attributes:
        data: the cells, each followed by its checksum.
        checksums: the crc32c of each cell.
        sizes: the size in bytes of each cell with its checksum.
        content: the crc32c of the chunk's elements in C order, taken before they were encoded; 0 if
            it was not asked for.
    """

    data: memoryview
    checksums: tuple[int, ...]
    sizes: tuple[int, ...]
    content: int = 0


def encoded_nbytes(tensor: StoredTensor, shape: Sequence[int]) -> int:
    """Return the size of the encoded cells of a chunk of this shape; compressed ones at most."""
    counts = (ceil_div(extent, cell) for extent, cell in zip(shape, tensor.cell, strict=True))
    header_nbytes = 0 if tensor.compression is None else BLOSC_HEADER_NBYTES
    return math.prod(counts) * (tensor.cell_nbytes + header_nbytes + CHECKSUM_NBYTES)


def encode_cells(
    tensor: StoredTensor, values: Bytes, into: Bytes, *, with_content: bool = False
) -> EncodedCells:
    """Encode a chunk's cells.

    Args:
        tensor: the chunk's tensor.
        values: the chunk's bytes within the tensor's edge; the last axis is one element's bytes.
        into: memory of `encoded_nbytes` for the cells.
        with_content: whether to take the checksum of what `values` has.
    """
    *shape, itemsize = values.shape
    counts = [ceil_div(extent, cell) for extent, cell in zip(shape, tensor.cell, strict=True)]
    padded_shape = [count * cell for count, cell in zip(counts, tensor.cell, strict=True)]
    is_split = tensor.compression is None and tuple(shape) != tensor.cell
    content = 0
    if with_content and not (is_split and shape == padded_shape):
        content = crc32c.crc32c(np.ascontiguousarray(values).data)
        with_content = False
    if shape != padded_shape:
        padded = np.zeros((*padded_shape, itemsize), np.uint8)
        padded[tuple(slice(0, extent) for extent in shape)] = values
        values = padded
    if is_split:
        encoded = _plain(tensor, counts, values, into, with_content=with_content)
    elif tensor.compression is None:
        encoded = _one_plain(values, into)
    else:
        encoded = _compressed(tensor, counts, values, into)
    return encoded if with_content else replace(encoded, content=content)


def _one_plain(values: Bytes, encoded: Bytes) -> EncodedCells:
    """Encode a chunk of one whole cell, as those of all small tensors are."""
    nbytes = values.nbytes
    content = encoded[:nbytes]
    content.reshape(values.shape)[...] = values
    checksum = crc32c.crc32c(content.data)
    encoded.data[nbytes:] = checksum.to_bytes(CHECKSUM_NBYTES, "little")
    return EncodedCells(encoded.data, (checksum,), (encoded.size,))


def _plain(
    tensor: StoredTensor,
    counts: Sequence[int],
    values: Bytes,
    memory: Bytes,
    *,
    with_content: bool,
) -> EncodedCells:
    """Encode a chunk in bands of rows, within one row of cells each."""
    nbytes, cell_rows = tensor.cell_nbytes, tensor.cell[0]
    size, cell_row_nbytes = nbytes + CHECKSUM_NBYTES, nbytes // cell_rows
    count, beside = math.prod(counts), math.prod(counts[1:])
    least_rows = ceil_div(_PART_NBYTES, cell_row_nbytes)
    band_rows = min(cell_rows, max(_BAND_NBYTES // (beside * cell_row_nbytes), least_rows))
    encoded = memory.reshape(-1, size)
    checksums, content = [0] * count, 0
    for first in range(0, counts[0] * beside, beside):
        cells = encoded[first : first + beside]
        for begin in range(0, cell_rows, band_rows):
            end = min(begin + band_rows, cell_rows)
            row = first // beside * cell_rows
            band = values[row + begin : row + end]
            if with_content:
                content = crc32c.crc32c(np.ascontiguousarray(band).data, content)
            parts = cells[:, begin * cell_row_nbytes : end * cell_row_nbytes]
            in_order = _cells_first(band, counts[1:], tensor.cell[1:])
            parts.reshape(in_order.shape)[...] = in_order
            for number, part in enumerate(parts, first):
                checksums[number] = crc32c.crc32c(part.data, checksums[number])
    encoded[:, nbytes:] = np.array(checksums, "<u4").view(np.uint8).reshape(-1, CHECKSUM_NBYTES)
    return EncodedCells(encoded.reshape(-1).data, tuple(checksums), (size,) * count, content)


def _cells_first(band: Bytes, counts: Sequence[int], cell: Sequence[int]) -> Bytes:
    """Return rows of a chunk, all of one row of cells, as a view with the axes of cells first.

    Args:
        band: the rows; its last axis is one element's bytes.
        counts: how many cells there are along each axis after the rows'.
        cell: their extents along these.
    """
    rank = len(counts)
    # Splitting an axis never needs a copy.
    after_rows = itertools.chain(*zip(counts, cell, strict=True))
    split = band.reshape(band.shape[0], *after_rows, band.shape[-1])
    of_cells, within = range(1, 2 * rank + 1, 2), range(2, 2 * rank + 1, 2)
    return split.transpose(*of_cells, 0, *within, 2 * rank + 1)


def _compressed(
    tensor: StoredTensor, counts: Sequence[int], values: Bytes, encoded: Bytes
) -> EncodedCells:
    checksums: list[int] = []
    sizes: list[int] = []
    end = 0
    for cell in _cells(tensor, counts, values):
        data = compress(cell, values.shape[-1])
        checksum = crc32c.crc32c(data)
        for piece in (data, checksum.to_bytes(CHECKSUM_NBYTES, "little")):
            encoded[end : end + len(piece)] = np.frombuffer(piece, np.uint8)
            end += len(piece)
        checksums.append(checksum)
        sizes.append(len(data) + CHECKSUM_NBYTES)
    return EncodedCells(encoded[:end].data, tuple(checksums), tuple(sizes))


def _cells(tensor: StoredTensor, counts: Sequence[int], values: Bytes) -> Iterator[Bytes]:
    """Yield the bytes of each cell, in memory that all of them share."""
    cell = np.empty((*tensor.cell, values.shape[-1]), np.uint8)
    for place in itertools.product(*map(range, counts)):
        starts = [n * extent for n, extent in zip(place, tensor.cell, strict=True)]
        box = tuple(slice(n, n + step) for n, step in zip(starts, tensor.cell, strict=True))
        cell[...] = values[box]
        yield cell.reshape(-1)


def compress(cell: Bytes, itemsize: int) -> bytes:
    """Return a cell as Zarr's codec `blosc` has it, by zstd.

    The library takes threads of its own only if the main thread calls it.

    Args:
        cell: its bytes.
        itemsize: bytes of an element.
    """
    # Only who compresses needs the library, and importing it takes longer than saving a little.
    from numcodecs import blosc

    compressed: bytes = blosc.compress(
        cell, b"zstd", BLOSC_LEVEL, blosc.SHUFFLE, cell.size, itemsize
    )
    return compressed


def decompress(data: Bytes, into: Bytes) -> None:
    """Decode what `compress` returned.

    Args:
        data: the compressed bytes.
        into: memory of the cell's size.

    Raises:
        ValueError: the bytes are not those of a cell of this size.
    """
    from numcodecs import blosc

    # Blosc believes its header, which says how much it reads and writes.
    header = data[:BLOSC_HEADER_NBYTES]
    nbytes, _, compressed_nbytes = (
        map(int, header[4:].view("<u4")) if header.size == BLOSC_HEADER_NBYTES else (0, 0, 0)
    )
    if (nbytes, compressed_nbytes) != (into.size, data.size):
        raise ValueError(
            f"its header tells of {nbytes} bytes in {compressed_nbytes}, it has {into.size} in "
            f"{data.size}"
        )
    try:
        blosc.decompress(data, into)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
