"""Opens entries of DCP's files when they are read: chunks of tensors, and other values.

A checkpoint has an entry per chunk, tens of thousands of them, and each rank needs its own. To
open one takes a few reads, so a chunk's is opened by the first read of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

from keepstep.checkpoint.convert.read.arrays import FileArray, Values
from keepstep.checkpoint.convert.read.dcp_metadata import ChunkedTensor
from keepstep.checkpoint.convert.read.files import Extent, damaged
from keepstep.checkpoint.convert.read.pieces import (
    ForeignTensor,
    Piece,
    assembled,
    first_of_each_box,
)
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.format.layout.boxes import Box

_PARALLEL_READS = 8


@dataclass(frozen=True)
class TensorEntry:
    """An entry that has one tensor, whose data type and shape the metadata says."""

    stored: Extent
    dtype: str
    shape: tuple[int, ...]

    @property
    def location(self) -> str:
        """URL of the file and the entry's place in it, for error messages."""
        return self.stored.location

    @cached_property
    def array(self) -> FileArray:
        """The tensor.

        Raises:
            CheckpointDamaged: the entry has another one, or none.
        """
        value = read_torch_file(self.stored)
        if not isinstance(value, FileArray):
            raise damaged(self.location, "the entry of a tensor has something else")
        if (value.dtype, value.shape) != (self.dtype, self.shape):
            raise damaged(
                self.location,
                f"it has {value.dtype} of shape {value.shape}, and .metadata says {self.dtype} of "
                f"shape {self.shape}",
            )
        if value.nbytes > self.stored.nbytes:
            raise damaged(
                self.location,
                f"its {self.stored.nbytes} bytes are repeated to a tensor of {value.nbytes}",
            )
        return value


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements that follow each other in a tensor of one dimension, in a shape."""

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EntryArray:
    """The elements in a box of an entry's tensor, or of a range of it."""

    entry: TensorEntry
    box: Box
    range: FlatRange | None = None

    @property
    def dtype(self) -> str:
        """See `Array.dtype`."""
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Array.shape`."""
        return self.box.shape

    @property
    def location(self) -> str:
        """See `Array.location`."""
        return self.entry.location

    @property
    def extents(self) -> tuple[Extent, ...]:
        """See `Array.extents`."""
        return self.entry.array.extents

    def narrow(self, box: Box) -> EntryArray:
        """See `Array.narrow`."""
        return replace(self, box=box.placed_in(self.box))

    def read_into(self, box: Box, into: Values) -> None:
        """See `Array.read_into`."""
        array = self.entry.array
        if self.range is not None:
            stop = self.range.start + math.prod(self.range.shape)
            array = array.flat_range(self.range.start, stop).reshaped(self.range.shape)
        array.read_into(box.placed_in(self.box), into)


def tensor_of_chunks(name: str, tensor: ChunkedTensor) -> ForeignTensor:
    """Return a tensor that is read from its chunks' entries.

    Raises:
        CheckpointDamaged: the chunks overlap, or do not cover the tensor.
    """
    pieces = (
        Piece(
            chunk.box,
            EntryArray(
                TensorEntry(chunk.stored, tensor.spec.dtype, chunk.box.shape),
                Box.whole(chunk.box.shape),
            ),
        )
        for chunk in tensor.chunks
    )
    return assembled(name, tensor.spec, first_of_each_box(pieces))


def opened(tensor: ForeignTensor) -> FileArray | None:
    """Return the array of a tensor of one chunk, or None if it has none or several.

    Raises:
        CheckpointDamaged: the entry has another tensor, or none.
    """
    arrays = [piece.array for piece in tensor.pieces]
    return arrays[0].entry.array if len(arrays) == 1 and isinstance(arrays[0], EntryArray) else None


def read_entries(stored: Mapping[str, Extent], names: Collection[str]) -> dict[str, object]:
    """Return the values of entries by name.

    Raises:
        CheckpointDamaged: an entry is no file of `torch.save`.
    """

    def read(name: str) -> object:
        return read_torch_file(stored[name])

    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        values: Iterator[object] = pool.map(read, names)
        return dict(zip(names, values, strict=True))
