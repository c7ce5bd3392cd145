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

from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.stored.chunking import StoredTensor

Bytes = npt.NDArray[np.uint8]

CHECKSUM_NBYTES = 4

BLOSC_LEVEL = 1
BLOSC_HEADER_NBYTES = 16
"""Bytes that Blosc adds, even to data that do not shrink."""

_BAND_NBYTES = 2**20
"""About how much of a chunk is read at a time: it stays in the processor's cache until the cells of
it have their checksums."""


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
    is_one_cell = tuple(shape) == tensor.cell and values.nbytes <= _BAND_NBYTES
    is_in_bands = tensor.compression is None and not is_one_cell
    content, content_by_bands = 0, with_content and is_in_bands and shape == padded_shape
    if with_content and not content_by_bands:
        content = crc32c.crc32c(np.ascontiguousarray(values).data)
    if shape != padded_shape:
        padded = np.zeros((*padded_shape, itemsize), np.uint8)
        padded[tuple(slice(0, extent) for extent in shape)] = values
        values = padded
    if is_in_bands:
        encoded = _plain(tensor, counts, values, into, with_content=content_by_bands)
    elif tensor.compression is None:
        encoded = _one_plain(values, into)
    else:
        encoded = _compressed(tensor, counts, values, into)
    return replace(encoded, content=content) if content else encoded


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
    nbytes, count = tensor.cell_nbytes, math.prod(counts)
    size = nbytes + CHECKSUM_NBYTES
    encoded = memory.reshape(-1, size)
    checksums, content = [0] * count, 0
    for band in _bands(values, counts, tensor.cell, encoded[:, :nbytes], 0):
        if with_content:
            content = crc32c.crc32c(np.ascontiguousarray(band.values).data, content)
        in_order = _cells_first(band.values, band.counts, band.cell)
        # A view: only axes are split.
        band.into.reshape(in_order.shape)[...] = in_order
        for number, part in enumerate(band.into, band.first):
            checksums[number] = crc32c.crc32c(part.data, checksums[number])
    encoded[:, nbytes:] = np.array(checksums, "<u4").view(np.uint8).reshape(-1, CHECKSUM_NBYTES)
    return EncodedCells(encoded.reshape(-1).data, tuple(checksums), (size,) * count, content)


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    """A part of a chunk that is read at once: some cells, or the same rows of some cells.

    Attributes:
        values: its elements; the last axis is one element's bytes.
        counts: how many cells it has parts of along each axis.
        cell: the shape of these parts.
        into: the encoded parts, a row for each.
        first: the number of the first of these cells within the chunk.
    """

    values: Bytes
    counts: Sequence[int]
    cell: Sequence[int]
    into: Bytes
    first: int


def _bands(
    values: Bytes, counts: Sequence[int], cell: Sequence[int], into: Bytes, first: int
) -> Iterator[_Band]:
    """Yield a chunk's bands in C order, of about `_BAND_NBYTES` each.

    One is larger where a cell has several elements along the first axis that cells have any of, and
    one element along it has more bytes.

    Args:
        values: the elements, of whole cells.
        counts: how many cells there are along each axis.
        cell: their shape.
        into: the encoded cells, a row for each.
        first: the number of the first cell.
    """
    if not values.size:
        return
    rows, per_row = cell[0], math.prod(counts[1:])
    row_nbytes = values[0].nbytes
    if rows * row_nbytes <= _BAND_NBYTES:
        step = _BAND_NBYTES // (rows * row_nbytes)
        for begin in range(0, counts[0], step):
            end = min(begin + step, counts[0])
            yield _Band(
                values[begin * rows : end * rows],
                (end - begin, *counts[1:]),
                cell,
                into[begin * per_row : end * per_row],
                first + begin * per_row,
            )
        return
    for place in range(counts[0]):
        cells = into[place * per_row : (place + 1) * per_row]
        number = first + place * per_row
        if rows == 1 and len(cell) > 1:
            # Such as one of a stack of matrices.
            yield from _bands(values[place], counts[1:], cell[1:], cells, number)
            continue
        step = max(1, _BAND_NBYTES // row_nbytes)
        nbytes = cells.shape[1] // rows
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield _Band(
                values[place * rows + begin : place * rows + end],
                (1, *counts[1:]),
                (end - begin, *cell[1:]),
                cells[:, begin * nbytes : end * nbytes],
                number,
            )


def _cells_first(values: Bytes, counts: Sequence[int], cell: Sequence[int]) -> Bytes:
    """Return elements as a view with the axes of cells before those within a cell.

    Args:
        values: the elements; the last axis is one element's bytes.
        counts: how many cells there are along each axis.
        cell: their shape.
    """
    rank = len(counts)
    # Splitting an axis never needs a copy.
    split = values.reshape(*itertools.chain(*zip(counts, cell, strict=True)), values.shape[-1])
    return split.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2), 2 * rank)


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
