"""Arrays filled as views and plans say, element by element: the meaning that tests compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.convert.rules.plan import Plan
from keepstep.checkpoint.convert.rules.views import View
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

EMPTY = -1
Array = npt.NDArray[Any]


def filled(
    shape: tuple[int, ...],
    views: Iterable[View],
    sources: Mapping[str, Array],
    dtype: Any = np.int64,
) -> Array:
    """Return an array with what the views say, and EMPTY where no view writes.

    No element is written twice.
    """
    target = np.full(shape, EMPTY, dtype=dtype)
    written = np.zeros(shape, dtype=bool)
    for view in views:
        into = _indices(view, "target", len(shape))
        assert not written[into].any(), "an element is written twice"
        written[into] = True
        if view.source is None:
            target[into] = 0
        else:
            source = sources[view.source]
            target[into] = source[_indices(view, "source", source.ndim)]
    return target


def made(plan: Plan, sources: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of a plan. Every element is written once."""
    arrays = {}
    for key, tensor in plan.tensors.items():
        dtype = numpy_dtype(tensor.spec.dtype)
        arrays[key] = filled(tensor.spec.shape, tensor.views, sources, dtype)
        assert sum(view.size for view in tensor.views) == arrays[key].size, key
    return arrays


def _indices(view: View, side: str, rank: int) -> tuple[Any, ...]:
    """Return, for each dimension, the places of the view's elements in the order of its grid."""
    grid = [axis.extent for axis in view.axes]
    places = np.indices(grid).reshape(len(grid), view.size).T
    offset = view.target_offset if side == "target" else view.source_offset
    indices = []
    for dim in range(rank):
        strides = [
            getattr(axis, f"{side}_stride") if getattr(axis, f"{side}_dim") == dim else 0
            for axis in view.axes
        ]
        indices.append(offset[dim] + places @ np.array(strides, dtype=np.int64))
    return tuple(indices)
