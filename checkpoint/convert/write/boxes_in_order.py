"""Reads tensors box after box, in C order, in as few reads as some memory allows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import crc32c
import numpy as np

from keepstep.checkpoint.convert.read.files import Extent
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import TensorSpec

_MOST_BLOCK_NBYTES = 16 * 2**20


def block_nbytes(memory_nbytes: int) -> int:
    """Return how much to read at once: blocks, their copies and other types' fit into a memory."""
    return max(1, min(memory_nbytes // 4, _MOST_BLOCK_NBYTES))


def boxes_in_order(spec: TensorSpec, most_nbytes: int) -> Iterator[Box]:
    """Yield boxes that cover a tensor, each a range of it in C order and of at most `most_nbytes`.

    A box has one element at least.
    """
    yield from _boxes((), spec.shape, max(1, most_nbytes // numpy_dtype(spec.dtype).itemsize))


def checksum_of(extent: Extent, most_nbytes: int) -> int:
    """Return the CRC-32C of a range of a file, reading at most `most_nbytes` at a time."""
    checksum = 0
    memory = np.empty(min(most_nbytes, extent.nbytes), np.uint8).data
    for start in range(0, extent.nbytes, most_nbytes):
        into = memory[: min(most_nbytes, extent.nbytes - start)]
        extent.file.read_into(extent.offset + start, [into])
        checksum = crc32c.crc32c(into, checksum)
    return checksum


def _boxes(first: tuple[int, ...], shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield the boxes of a tensor's part at these places of its first dimensions.

    `shape` is the shape of that part.
    """
    ones = (1,) * len(first)
    if math.prod(shape) == 0:
        return
    if not shape or math.prod(shape) <= most:
        yield Box((*first, *(0 for _ in shape)), (*ones, *shape))
        return
    row = math.prod(shape[1:])
    if row > most:
        for place in range(shape[0]):
            yield from _boxes((*first, place), shape[1:], most)
        return
    zeros = (0,) * (len(shape) - 1)
    count = most // row
    for start in range(0, shape[0], count):
        extent = min(count, shape[0] - start)
        yield Box((*first, start, *zeros), (*ones, extent, *shape[1:]))
