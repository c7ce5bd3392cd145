"""Fills live tensors with boxes of a source, by one rank alone.

All ranks fill theirs together in `keepstep.checkpoint.ranks.shared_restore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from keepstep.checkpoint.live.tensors import (
    LiveTensor,
    as_bytes,
    copyable,
    is_plain,
    torch_dtype,
)

Bytes = npt.NDArray[np.uint8]

_STAGING_NBYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Fill:
    """A live tensor to fill from a source's tensor of this data type.

    `tensor` has the source's key and, if they differ, the source's order of dimensions. `box` is
    the part of its box that the source has: all of it, or, for a tensor that is larger than in the
    source or padded otherwise, a part; the rest is zeroed or kept. It is None if there is no such
    part.
    """

    tensor: LiveTensor
    dtype: str
    box: Box | None
    zeroes_rest: bool = True

    @property
    def nbytes(self) -> int:
        """Number of bytes to read from the source."""
        return self.box.size * self.itemsize if self.box else 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the source."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the source's bytes can be read into the live tensor's memory as they are."""
        return (
            self.dtype == self.tensor.dtype
            and self.box == self.tensor.box
            and is_plain(self.tensor.data)
        )

    def memory(self, box: Box) -> Bytes | None:
        """Return the live memory of a box if it is contiguous and takes the source's bytes.

        The array has the box's shape plus a last axis of an element's bytes.
        """
        if not self.is_direct:
            return None
        part = self._bytes(box)
        return part if part.flags.c_contiguous else None

    def place(self, box: Box, data: Bytes) -> None:
        """Fill a box of the live tensor, converting the data if necessary.

        Args:
            box: a part of `box`, in coordinates of the global tensor.
            data: the source's bytes, in the shape that `memory` returns.
        """
        if self.is_direct:
            self._bytes(box)[...] = data
            return
        values = torch.from_numpy(np.ascontiguousarray(data)).view(torch_dtype(self.dtype))
        with torch.no_grad():
            part = copyable(self.tensor.data[box.within(self.tensor.box).slices])
            part.copy_(copyable(values.reshape(box.shape)))

    def zero_rest(self) -> None:
        """Zero a tensor that the source has only in part, before it is filled, if asked to."""
        if self.zeroes_rest and self.box != self.tensor.box:
            with torch.no_grad():
                copyable(self.tensor.data).zero_()

    def _bytes(self, box: Box) -> Bytes:
        """Return the memory of a box of a plain tensor."""
        live = self.tensor
        values = np.frombuffer(as_bytes(live.data), np.uint8)
        return values.reshape(*live.box.shape, self.itemsize)[box.within(live.box).slices]


def fill(fills: Sequence[Fill], source: Source) -> None:
    """Fill live tensors from a source, by this rank alone.

    Contiguous CPU tensors are read directly; others go through buffers of bounded size, page-locked
    for CUDA.
    """
    direct = [item for item in fills if item.is_direct]
    if direct:
        source.read([
            BoxRequest(item.tensor.key, item.tensor.box, as_bytes(item.tensor.data))
            for item in direct
        ])  # fmt: skip
    for batch in _batches([item for item in fills if not item.is_direct]):
        _fill_staged(batch, source)


def _fill_staged(fills: Sequence[Fill], source: Source) -> None:
    """Fill tensors by way of CPU buffers."""
    buffers = [
        torch.empty(
            item.box.shape if item.box else 0,
            dtype=torch_dtype(item.dtype),
            pin_memory=item.tensor.data.is_cuda,
        )
        for item in fills
    ]
    source.read([
        BoxRequest(item.tensor.key, item.box, as_bytes(buffer))
        for item, buffer in zip(fills, buffers, strict=True)
        if item.box
    ])  # fmt: skip
    with torch.no_grad():
        for item, buffer in zip(fills, buffers, strict=True):
            item.zero_rest()
            if item.box:
                part = copyable(item.tensor.data[item.box.within(item.tensor.box).slices])
                part.copy_(copyable(buffer))


def _batches(fills: Sequence[Fill]) -> Iterator[list[Fill]]:
    """Yield the fills in batches of about `_STAGING_NBYTES`."""
    batch: list[Fill] = []
    nbytes = 0
    for item in fills:
        size = item.tensor.data.numel() * item.tensor.data.element_size()
        if batch and nbytes + size > _STAGING_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch
