"""Converts flat fragments, contiguous ranges of a flattened tensor, to boxes.

Pure. FSDP1 and ZeRO keep parameters one after the other in a flat buffer and cut that between the
ranks without regard to rows, so a rank has a range of a parameter's elements. Such a range is a few
boxes, each contiguous in it: in the order of the boxes the buffer holds one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from keepstep.checkpoint.format.layout.boxes import Box


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Return the boxes that make up a range of a tensor's elements in C order.

    The boxes are disjoint, not empty, and in the order of their elements. A tensor with n
    dimensions has at most 2n - 1: pieces of the first row, whole rows, pieces of the last row, and
    the same within the pieces.

    Args:
        shape: shape of the whole tensor.
        start: the first element of the flattened tensor that belongs to the range.
        stop: the first element after it.

    Raises:
        ValueError: the tensor does not have these elements.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} has {size} elements, so none from {start} to {stop}"
        )
    return tuple(_boxes((), tuple(shape), start, stop))


def _boxes(rows: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range of the part of a tensor at these places in its first dimensions.

    `shape` is that part's.
    """
    if start == stop:
        return
    ones = (1,) * len(rows)
    if not shape:
        yield Box(rows, ones)
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _boxes((*rows, first), shape[1:], head, tail)
        return
    if head:
        yield from _boxes((*rows, first), shape[1:], head, row)
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Box((*rows, first, *zeros), (*ones, last - first, *shape[1:]))
    yield from _boxes((*rows, last), shape[1:], 0, tail)
