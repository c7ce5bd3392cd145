"""Copies views between arrays, however many elements apart, without a loop over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.convert.rules.views import View
from keepstep.checkpoint.format.layout.boxes import Box

Array = npt.NDArray[Any]


def copy_view(
    view: View,
    target: Array,
    source: Array | None,
    *,
    target_origin: Sequence[int] | None = None,
    source_origin: Sequence[int] | None = None,
) -> None:
    """Copy the elements of a view.

    Args:
        view: from the source tensor to the target tensor.
        target: the target tensor, or a box of it that contains the view; writable.
        source: the source tensor, or a box of it that contains the view, in any strides; None for
            a view of zeros.
        target_origin: offset of the target's array in its tensor; zeros if None.
        source_origin: the same of the source.

    Raises:
        ValueError: an array does not contain the view's elements.
    """
    extents = [axis.extent for axis in view.axes]
    steps = [(axis.target_dim, axis.target_stride) for axis in view.axes]
    into = _grid(target, view.target_box, target_origin, extents, steps)
    if view.source is None:
        into[...] = 0
    elif source is None:
        raise ValueError(f"the view is of {view.source}, but no array of it is given")
    else:
        steps = [(axis.source_dim, axis.source_stride) for axis in view.axes]
        into[...] = _grid(source, view.source_box, source_origin, extents, steps)


def _grid(
    array: Array,
    box: Box,
    origin: Sequence[int] | None,
    extents: Sequence[int],
    steps: Sequence[tuple[int, int]],
) -> Array:
    """Return elements of a box of a tensor, as an array with one axis for each (dim, stride)."""
    origin = (0,) * len(box.offset) if origin is None else origin
    offset = tuple(at - start for at, start in zip(box.offset, origin, strict=True))
    if len(offset) != array.ndim or any(
        at < 0 or at + extent > size
        for at, extent, size in zip(offset, box.shape, array.shape, strict=True)
    ):
        raise ValueError(
            f"an array of shape {array.shape} at {tuple(origin)} does not contain the box at "
            f"{box.offset} of shape {box.shape}"
        )
    slices = (slice(at, at + extent) for at, extent in zip(offset, box.shape, strict=True))
    # With an ellipsis a tensor without dimensions gives an array too, not a copy of its number.
    selection: tuple[Any, ...] = (..., *slices)
    inside = array[selection]
    # Safe: the box holds all that these strides reach.
    return np.lib.stride_tricks.as_strided(
        inside, extents, [stride * inside.strides[dim] for dim, stride in steps]
    )
