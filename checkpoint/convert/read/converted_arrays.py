"""Converts elements to another data type than they are stored in, when they are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepstep.checkpoint.convert.read.arrays import FileArray, Values, dense_parts, view_of
from keepstep.checkpoint.convert.read.files import Extent
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype


@dataclass(frozen=True, slots=True)
class ConvertedArray:
    """The elements of a file in a floating-point type, rounded to the nearest as torch does."""

    stored: FileArray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Array.shape`."""
        return self.stored.shape

    @property
    def location(self) -> str:
        """See `Array.location`."""
        return self.stored.location

    @property
    def extents(self) -> tuple[Extent, ...]:
        """See `Array.extents`."""
        return self.stored.extents

    def narrow(self, box: Box) -> ConvertedArray:
        """See `Array.narrow`."""
        return ConvertedArray(self.stored.narrow(box), self.dtype)

    def read_into(self, box: Box, into: Values) -> None:
        """See `Array.read_into`. It needs a few MiB more at most."""
        for part_box, part in dense_parts(self.stored.narrow(box)):
            with np.errstate(over="ignore", invalid="ignore"):
                view_of(into, part_box)[...] = part.read().astype(numpy_dtype(self.dtype))
