"""Describes arrays in other tools' files, and views of them that read nothing.

A `FileArray` is elements of a file at regular distances: a stored tensor, its transpose, a layer of
a stack, a range of a flat buffer. So what other tools do to tensors before they store them becomes
a view, and only what is asked for is ever read.

Invariant: a `FileArray` never reaches beyond the bytes of its extent, whatever shape and strides
the file claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.convert.read.files import Extent, damaged
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

Values = npt.NDArray[Any]

READ_NBYTES = 2**22
"""The most bytes of a file that one read takes into memory."""

GAP_NBYTES = 2**16
"""Bytes between wanted ones that are read along: a request costs more than they do."""

# Files may claim that few elements repeat to fill any shape, as torch's `expand` does.
_MOST_REPEATED_NBYTES = 2**30
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**60


class Array(Protocol):
    """Elements of a data type in a shape, readable by boxes."""

    @property
    def dtype(self) -> str:
        """Data type, named as in `keepstep.checkpoint.format.layout.dtypes`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements in each dimension."""
        ...

    @property
    def location(self) -> str:
        """Where the elements are, for error messages."""
        ...

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The bytes of files that the elements are in, or are computed from; not of a pickle."""
        ...

    def narrow(self, box: Box) -> Array:
        """Return the elements in a box, as an array of the box's shape."""
        ...

    def read_into(self, box: Box, into: Values) -> None:
        """Copy the elements in a box.

        Args:
            box: a part of this array.
            into: an array of the box's shape and of the NumPy counterpart of `dtype`, of any
                strides, perhaps not aligned.

        Raises:
            CheckpointError: they cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileArray:
    """Elements of a file at regular distances.

    Attributes:
        extent: the bytes that have the elements, little-endian.
        dtype: as in `Array`.
        shape: as in `Array`.
        strides: distance between neighbours in each dimension, in elements; not negative.
        start: position of the first element in the extent, in elements.

    Raises:
        CheckpointDamaged: shape and strides reach beyond the extent, or are absurd.
    """

    extent: Extent
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def __setstate__(self, state: object) -> None:
        # Attributes that a pickle sets on a tensor are no part of its elements.
        pass

    def __post_init__(self) -> None:
        numbers = (self.start, *self.shape, *self.strides)
        if (
            len(self.shape) != len(self.strides)
            or len(self.shape) > _MOST_DIMENSIONS
            or any(type(number) is not int or number < 0 for number in numbers)
            or max(numbers) > _MOST_ELEMENTS
            or self.size > _MOST_ELEMENTS
        ):
            raise damaged(
                self.extent.location,
                f"no tensor has shape {safe_repr(self.shape)}, strides {safe_repr(self.strides)} "
                f"and begins at element {safe_repr(self.start)}",
            )
        if not self.size:
            return
        end = self.start * self.itemsize + self.span_nbytes
        if end > self.extent.nbytes:
            raise damaged(
                self.extent.location,
                f"a tensor of shape {self.shape}, strides {self.strides} and data type "
                f"{self.dtype} that begins at element {self.start} needs {end} bytes of storage, "
                f"which has {self.extent.nbytes}",
            )
        if self.nbytes > max(self.extent.nbytes, _MOST_REPEATED_NBYTES):
            raise damaged(
                self.extent.location,
                f"{self.extent.nbytes} bytes of storage are repeated to a tensor of "
                f"{self.nbytes} bytes",
            )

    @classmethod
    def contiguous(cls, extent: Extent, dtype: str, shape: Sequence[int]) -> FileArray:
        """Return the array that an extent holds in C order, exactly.

        Raises:
            CheckpointDamaged: the extent has another size.
        """
        array = cls(extent, dtype, tuple(shape), contiguous_strides(shape))
        if array.nbytes != extent.nbytes:
            raise damaged(
                extent.location,
                f"a tensor of shape {tuple(shape)} and data type {dtype} has {array.nbytes} bytes, "
                f"and {extent.nbytes} are stored",
            )
        return array

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return self.size * self.itemsize

    @property
    def location(self) -> str:
        """See `Array.location`."""
        return self.extent.location

    @property
    def extents(self) -> tuple[Extent, ...]:
        """See `Array.extents`."""
        return (self.extent,)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        return not self.size or all(
            extent == 1 or stride == expected
            for extent, stride, expected in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    @property
    def file_offset(self) -> int:
        """Position of the first element in the file, in bytes."""
        return self.extent.offset + self.start * self.itemsize

    @property
    def span_nbytes(self) -> int:
        """Bytes of the file from the first element to the end of the last."""
        if not self.size:
            return 0
        # The distance from the first element to the last.
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    def narrow(self, box: Box) -> FileArray:
        """See `Array.narrow`.

        Raises:
            ValueError: the array does not have the box.
        """
        if len(box.shape) != len(self.shape) or any(
            offset + extent > most
            for offset, extent, most in zip(box.offset, box.shape, self.shape, strict=True)
        ):
            raise ValueError(f"an array of shape {self.shape} does not have {box}")
        start = self.start + sum(o * s for o, s in zip(box.offset, self.strides, strict=True))
        return FileArray(
            self.extent, self.dtype, box.shape, self.strides, start if box.size else self.start
        )

    def reshaped(self, shape: Sequence[int]) -> FileArray:
        """Return the elements, in C order, in another shape.

        Raises:
            ValueError: the shape has another number of elements, or the elements lie so that no
                strides describe it; split the array into parts for which there are.
        """
        strides = None
        if min(shape, default=0) >= 0 and math.prod(shape) == self.size:
            strides = _view_strides(self.shape, self.strides, tuple(shape))
        if strides is None:
            raise ValueError(
                f"an array of shape {self.shape} and strides {self.strides} cannot be viewed in "
                f"shape {tuple(shape)}"
            )
        return FileArray(self.extent, self.dtype, tuple(shape), strides, self.start)

    def flat_range(self, start: int, stop: int) -> FileArray:
        """Return the elements from `start` to before `stop`, in C order, in one dimension.

        Raises:
            ValueError: the array does not have them, or they do not lie at one distance.
        """
        return self.reshaped((self.size,)).narrow(Box((start,), (stop - start,)))

    def read_into(self, box: Box, into: Values) -> None:
        """See `Array.read_into`."""
        for part_box, part in dense_parts(self.narrow(box)):
            buffer = bytearray(part.span_nbytes)
            part.extent.file.read_into(part.file_offset, [memoryview(buffer)])
            copy_span(memoryview(buffer), part, view_of(into, part_box))

    def read(self) -> Values:
        """Return all elements.

        Raises:
            CheckpointError: they cannot be read.
        """
        values = np.empty(self.shape, numpy_dtype(self.dtype))
        self.read_into(Box.whole(self.shape), values)
        return values


def copy_span(span: memoryview, array: FileArray, into: Values) -> None:
    """Copy an array's elements from the `span_nbytes` bytes of its file that span them."""
    # As void the elements need no alignment, and their bits are not looked at.
    raw = np.dtype(f"V{array.itemsize}")
    strides = tuple(stride * array.itemsize for stride in array.strides)
    into.view(raw)[...] = np.ndarray(array.shape, raw, span, 0, strides)


def dense_parts(
    array: FileArray, most_nbytes: int = READ_NBYTES, gap_nbytes: int = GAP_NBYTES
) -> Iterator[tuple[Box, FileArray]]:
    """Yield the parts, with their boxes in the array, that are each to be read by one read.

    A part spans at most `most_nbytes` of the file (or one element), and leaves out at most
    `gap_nbytes` in a row. Parts are disjoint and have all elements.
    """
    pending = [(Box.whole(array.shape), array)] if array.size else []
    while pending:
        box, part = pending.pop()
        longer = [axis for axis, extent in enumerate(part.shape) if extent > 1]
        if not longer:
            yield box, part
            continue
        axis = max(longer, key=lambda n: part.strides[n])
        step = part.strides[axis] * part.itemsize
        inner = part.span_nbytes - (part.shape[axis] - 1) * step
        is_dense = step - inner <= gap_nbytes
        if is_dense and part.span_nbytes <= most_nbytes:
            yield box, part
            continue
        count = 1
        if is_dense and step and inner < most_nbytes:
            count = min((most_nbytes - inner) // step + 1, part.shape[axis] - 1)
        split = []
        for start in range(0, part.shape[axis], count):
            offset, shape = [0] * len(part.shape), list(part.shape)
            offset[axis], shape[axis] = start, min(count, part.shape[axis] - start)
            inside = Box(tuple(offset), tuple(shape))
            split.append((inside.placed_in(box), part.narrow(inside)))
        pending.extend(reversed(split))


@dataclass(frozen=True, slots=True, eq=False)
class MemoryArray:
    """Elements in memory, such as those of a NumPy array that a file holds in a pickle."""

    dtype: str
    values: Values
    location: str

    def __post_init__(self) -> None:
        if self.values.dtype != numpy_dtype(self.dtype):
            raise LayoutMismatch(
                f"{self.location}: elements of {self.values.dtype} are not of {self.dtype}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Array.shape`."""
        return self.values.shape

    @property
    def extents(self) -> tuple[Extent, ...]:
        """See `Array.extents`: none."""
        return ()

    def narrow(self, box: Box) -> MemoryArray:
        """See `Array.narrow`."""
        return MemoryArray(self.dtype, view_of(self.values, box), self.location)

    def read_into(self, box: Box, into: Values) -> None:
        """See `Array.read_into`."""
        into[...] = view_of(self.values, box)


@dataclass(frozen=True, slots=True, eq=False)
class ComputedArray:
    """Elements that a function makes when they are read.

    Attributes:
        dtype: see `Array.dtype`.
        location: see `Array.location`.
        box: the part of all that the function makes.
        read: copies the elements in a part of all to an array of its shape.
        sources: the arrays that it reads.
    """

    dtype: str
    location: str
    box: Box
    read: Callable[[Box, Values], None] = field(repr=False)
    sources: tuple[Array, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Array.shape`."""
        return self.box.shape

    @property
    def extents(self) -> tuple[Extent, ...]:
        """See `Array.extents`."""
        return tuple(extent for source in self.sources for extent in source.extents)

    def narrow(self, box: Box) -> ComputedArray:
        """See `Array.narrow`."""
        return replace(self, box=box.placed_in(self.box))

    def read_into(self, box: Box, into: Values) -> None:
        """See `Array.read_into`."""
        self.read(box.placed_in(self.box), into)


def view_of(values: Values, box: Box) -> Values:
    """Return the part of a NumPy array in a box, as a view also if it has no dimension."""
    index: Any = (*box.slices, ...)
    view: Values = values[index]
    return view


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the distances between neighbours, in elements, of an array in C order."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def _view_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return strides that give the elements another shape, or None if there are none."""
    if not math.prod(shape):
        return contiguous_strides(wanted)
    kept = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    # Neighbouring dimensions that are one run of equal distances are merged, from the last on.
    runs: list[tuple[int, int]] = []
    for extent, stride in reversed(kept):
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * extent, runs[-1][1])
        else:
            runs.append((extent, stride))
    result = [1] * len(wanted)
    left, distance = 1, 1
    position = 0
    for axis in range(len(wanted) - 1, -1, -1):
        if wanted[axis] == 1:
            continue
        if left == 1:
            left, distance = runs[position]
            position += 1
        if left % wanted[axis]:
            return None
        result[axis] = distance
        left //= wanted[axis]
        distance *= wanted[axis]
    return tuple(result)
