"""Represents files piece by piece: bytes, and tensor data that are read lazily.

So a file of any size is planned in little memory, is written from beginning to end, and comes out
the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.convert.write.selection import rounded
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.fragments import boxes_of_range
from keepstep.checkpoint.format.layout.source import BoxRequest, Source, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """Elements of a tensor, box after box, each in C order.

    Attributes:
        source: what has the tensor.
        key: the tensor.
        boxes: its parts, in the order in which they are in the file.
        dtype: the data type in the file: the tensor's, or another floating-point type.
    """

    source: Source
    key: str
    boxes: tuple[Box, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return sum(box.size for box in self.boxes) * numpy_dtype(self.dtype).itemsize

    def blocks(self, most_nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes, about `most_nbytes` at a time, in memory that may be used again.

        Raises:
            CheckpointError: they cannot be read, or are damaged.
        """
        stored = self.source.tensors[self.key].dtype
        memory = np.empty(0, numpy_dtype(stored))
        for box in self.boxes:
            for part in boxes_in_order(TensorSpec(stored, box.shape), most_nbytes):
                if memory.size < part.size:
                    memory = np.empty(part.size, numpy_dtype(stored))
                values = memory[: part.size]
                request = BoxRequest(self.key, part.placed_in(box), values.view(np.uint8).data)
                self.source.read([request])
                if self.dtype == stored:
                    yield request.into
                else:
                    yield rounded(values, self.dtype).view(np.uint8).data


Piece = bytes | Elements


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a file: its type, its shape, and the pieces that have its elements in C order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Transposed:
    """A tensor of two dimensions whose elements are another's, which is its transpose."""

    of: StoredTensor


def whole(source: Source, key: str, dtype: str | None = None) -> StoredTensor:
    """Return all of a tensor, perhaps in another floating-point type."""
    spec = source.tensors[key]
    dtype = dtype or spec.dtype
    boxes = (Box.whole(spec.shape),)
    return StoredTensor(dtype, spec.shape, (Elements(source, key, boxes, dtype),))


def part(source: Source, key: str, box: Box) -> StoredTensor:
    """Return the elements in a box of a tensor."""
    dtype = source.tensors[key].dtype
    return StoredTensor(dtype, box.shape, (Elements(source, key, (box,), dtype),))


def elements_of_range(
    source: Source, key: str, start: int, stop: int, dtype: str | None = None
) -> Elements:
    """Return a range of the elements of a flattened tensor."""
    spec = source.tensors[key]
    return Elements(source, key, boxes_of_range(spec.shape, start, stop), dtype or spec.dtype)


def nbytes_of_pieces(pieces: Iterable[Piece]) -> int:
    """Return how many bytes pieces are together."""
    return sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in pieces)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return pieces with bytes that follow each other made one."""
    result: list[Piece] = []
    # Made one when it is complete: thousands of values follow each other.
    run: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            run.append(piece)
        elif piece.nbytes:
            if run:
                result.append(b"".join(run))
                run = []
            result.append(piece)
    if run:
        result.append(b"".join(run))
    return tuple(result)
