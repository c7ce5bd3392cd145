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
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class EncodedCells:
    """The cells of a chunk, encoded, one after the other in C order.

    Attributes:
        data: the cells, each followed by its checksum.
        checksums: the crc32c of each cell.
        sizes: the size in bytes of each cell with its checksum.
    """

    data: memoryview
    checksums: tuple[int, ...]
    sizes: tuple[int, ...]


def encoded_nbytes(tensor: StoredTensor, shape: Sequence[int]) -> int:
    """Return the size of the encoded cells of a chunk of this shape; compressed ones at most."""
    counts = (ceil_div(extent, cell) for extent, cell in zip(shape, tensor.cell, strict=True))
    header_nbytes = 0 if tensor.compression is None else BLOSC_HEADER_NBYTES
    return math.prod(counts) * (tensor.cell_nbytes + header_nbytes + CHECKSUM_NBYTES)


def encode_cells(tensor: StoredTensor, values: Bytes, into: Bytes) -> EncodedCells:
    """Encode a chunk's cells.

    Args:
        tensor: the chunk's tensor.
        values: the chunk's bytes within the tensor's edge; the last axis is one element's bytes.
        into: memory of `encoded_nbytes` for the cells.
    """
    *shape, itemsize = values.shape
    if tensor.compression is None and tuple(shape) == tensor.cell:
        return _one_plain(values, into)
    counts = [ceil_div(extent, cell) for extent, cell in zip(shape, tensor.cell, strict=True)]
    padded_shape = [count * cell for count, cell in zip(counts, tensor.cell, strict=True)]
    if shape != padded_shape:
        padded = np.zeros((*padded_shape, itemsize), np.uint8)
        padded[tuple(slice(0, extent) for extent in shape)] = values
        values = padded
    # For each axis of the tensor there is then one for the cell's place and one for the element's
    # place within the cell. These are views: splitting an axis never needs a copy.
    rank = len(shape)
    split = values.reshape(*itertools.chain(*zip(counts, tensor.cell, strict=True)), itemsize)
    in_order = split.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2), 2 * rank)
    if tensor.compression is None:
        return _plain(tensor, counts, in_order, into)
    return _compressed(tensor, counts, in_order, into)


def _one_plain(values: Bytes, encoded: Bytes) -> EncodedCells:
    """Encode a chunk of one whole cell, as those of all small tensors are."""
    nbytes = values.nbytes
    content = encoded[:nbytes]
    content.reshape(values.shape)[...] = values
    checksum = crc32c.crc32c(content.data)
    encoded.data[nbytes:] = checksum.to_bytes(CHECKSUM_NBYTES, "little")
    return EncodedCells(encoded.data, (checksum,), (encoded.size,))


def _plain(
    tensor: StoredTensor, counts: Sequence[int], in_order: Bytes, memory: Bytes
) -> EncodedCells:
    nbytes, count = tensor.cell_nbytes, math.prod(counts)
    size = nbytes + CHECKSUM_NBYTES
    encoded = memory.reshape(-1, size)
    itemsize = in_order.shape[-1]
    encoded[:, :nbytes].reshape(*counts, *tensor.cell, itemsize)[...] = in_order
    checksums = tuple(crc32c.crc32c(cell[:nbytes].data) for cell in encoded)
    encoded[:, nbytes:] = np.array(checksums, "<u4").view(np.uint8).reshape(-1, CHECKSUM_NBYTES)
    return EncodedCells(encoded.reshape(-1).data, checksums, (size,) * count)


def _compressed(
    tensor: StoredTensor, counts: Sequence[int], in_order: Bytes, encoded: Bytes
) -> EncodedCells:
    checksums: list[int] = []
    sizes: list[int] = []
    end = 0
    for cell in _cells(tensor, counts, in_order):
        data = compress(cell, in_order.shape[-1])
        checksum = crc32c.crc32c(data)
        for piece in (data, checksum.to_bytes(CHECKSUM_NBYTES, "little")):
            encoded[end : end + len(piece)] = np.frombuffer(piece, np.uint8)
            end += len(piece)
        checksums.append(checksum)
        sizes.append(len(data) + CHECKSUM_NBYTES)
    return EncodedCells(encoded[:end].data, tuple(checksums), tuple(sizes))


def _cells(tensor: StoredTensor, counts: Sequence[int], in_order: Bytes) -> Iterator[Bytes]:
    """Yield the bytes of each cell, in memory that all of them share."""
    cell = np.empty((*tensor.cell, in_order.shape[-1]), np.uint8)
    for place in itertools.product(*map(range, counts)):
        cell[...] = in_order[place]
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
