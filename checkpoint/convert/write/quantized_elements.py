"""Computes what codes and scales stand for.

Pure but for the reads of the checkpoint. The arithmetic is in float32, or in float64 if the scales
are: one rounding, so that what is rounded again to the type of the scales is what the libraries of
GPTQ, AWQ and compressed-tensors compute in that type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.errors import CheckpointDamaged, LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.quantized import WORD_BITS, Blocks, Packing, QuantizedWeight
from keepstep.checkpoint.format.layout.source import BoxRequest, Source

Values = npt.NDArray[Any]


def dtype_of(source: Source, weight: QuantizedWeight) -> str:
    """Return the data type in which `elements` are."""
    return "float64" if source.tensors[weight.scale].dtype == "float64" else "float32"


def elements(source: Source, weight: QuantizedWeight, box: Box) -> Values:
    """Return what a box of a weight stands for.

    Args:
        weight: one that was recognized in it.
        box: a part of the weight.

    Raises:
        CheckpointDamaged: groups of inputs are named that have no scales.
        LayoutMismatch: the weight has another shape than its codes tell.
        CheckpointError: a read failed.
    """
    dtype = numpy_dtype(dtype_of(source, weight))
    if isinstance(weight.form, Blocks):
        return _of_blocks(source, weight, weight.form.shape, box, dtype)
    return _of_words(source, weight, weight.form, box, dtype)


def _of_blocks(
    source: Source,
    weight: QuantizedWeight,
    block: tuple[int, ...],
    box: Box,
    dtype: np.dtype,
) -> Values:
    codes = _read(source, weight.codes, box).astype(dtype)
    if weight.zero_point is not None:
        codes -= _spread(source, weight.zero_point, weight.shape, block, box).astype(dtype)
    codes *= _spread(source, weight.scale, weight.shape, block, box).astype(dtype)
    return codes


def _spread(
    source: Source, key: str, shape: tuple[int, ...], block: tuple[int, ...], box: Box
) -> Values:
    """Return the scale of each element of a box, in a shape that fits the box's."""
    grid = tuple(map(ceil_div, shape, block))
    first = tuple(start // extent for start, extent in zip(box.offset, block, strict=True))
    ends = zip(box.offset, box.shape, block, strict=True)
    last = tuple(ceil_div(start + count, extent) for start, count, extent in ends)
    part = Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))
    spec = source.tensors[key]
    if spec.shape == grid:
        scales = _read(source, key, part)
    else:
        # Dimensions of 1 are left out or added.
        scales = _read(source, key, Box.whole(spec.shape)).reshape(grid)[part.slices]
    for axis, (start, count, extent) in enumerate(zip(box.offset, box.shape, block, strict=True)):
        if scales.shape[axis] > 1:
            offset = start - first[axis] * extent
            scales = np.take(scales, (np.arange(count) + offset) // extent, axis)
    return scales


def _of_words(
    source: Source, weight: QuantizedWeight, form: Packing, box: Box, dtype: np.dtype
) -> Values:
    if weight.stored_shape is not None:
        stored = _read(source, weight.stored_shape, Box.whole((len(weight.shape),)))
        if tuple(stored) != weight.shape:
            raise LayoutMismatch(
                f"{weight.key}: {weight.stored_shape} says {tuple(stored)}, and the codes "
                f"{weight.shape}; elements that end within a word are not dequantized"
            )
    inputs, outputs = _range(box, 1), _range(box, 0)
    in_storage = (outputs, inputs) if form.input_axis == 1 else (inputs, outputs)
    codes = _unpacked(source, weight.codes, form, form.packed_axis, in_storage)
    groups = _groups(source, weight, form, inputs)
    scale_box = _with_groups(form, groups, outputs)
    places = groups - groups.min()
    scales = _read(source, weight.scale, _box(scale_box)).astype(dtype)
    if weight.zero_point is None:
        values = (codes - 2 ** (form.bits - 1)).astype(dtype)
    else:
        zeros = _unpacked(
            source, weight.zero_point, form, 1 - form.input_axis, scale_box, add=form.added_to_zeros
        )
        values = (codes - np.take(zeros, places, form.input_axis)).astype(dtype)
    values *= np.take(scales, places, form.input_axis)
    in_rows: Values = values if form.input_axis == 1 else values.T
    return in_rows


def _groups(
    source: Source, weight: QuantizedWeight, form: Packing, inputs: range
) -> npt.NDArray[np.int64]:
    """Return the group of each of these inputs."""
    if weight.groups is None:
        return np.arange(inputs.start, inputs.stop, dtype=np.int64) // form.group_size
    groups = _read(source, weight.groups, _box((inputs,))).astype(np.int64)
    count = source.tensors[weight.scale].shape[form.input_axis]
    if groups.min() < 0 or groups.max() >= count:
        raise CheckpointDamaged(
            f"{weight.groups} names groups from {groups.min()} to {groups.max()}, and there are "
            f"{count}; look for another copy of the checkpoint"
        )
    return groups


def _with_groups(
    form: Packing, groups: npt.NDArray[np.int64], outputs: range
) -> tuple[range, range]:
    of_groups = range(int(groups.min()), int(groups.max()) + 1)
    return (outputs, of_groups) if form.input_axis == 1 else (of_groups, outputs)


def _unpacked(
    source: Source, key: str, form: Packing, axis: int, wanted: Sequence[range], *, add: int = 0
) -> npt.NDArray[np.int32]:
    """Return a box of a matrix whose elements share words along an axis, to which this is added."""
    per_word = WORD_BITS // form.bits
    first, end = wanted[axis].start // per_word, ceil_div(wanted[axis].stop, per_word)
    box = [*wanted]
    box[axis] = range(first, end)
    words = np.moveaxis(_read(source, key, _box(box)).view(np.uint32), axis, -1) + np.uint32(add)
    shifts = np.array(form.places, np.uint32) * np.uint32(form.bits)
    separate = (words[..., np.newaxis] >> shifts) & np.uint32(2**form.bits - 1)
    flat = separate.reshape(*words.shape[:-1], -1).astype(np.int32)
    start = wanted[axis].start - first * per_word
    return np.moveaxis(flat[..., start : start + len(wanted[axis])], -1, axis)


def _read(source: Source, key: str, box: Box) -> Values:
    values = np.empty(box.shape, numpy_dtype(source.tensors[key].dtype))
    source.read([BoxRequest(key, box, values.reshape(-1).view(np.uint8).data)])
    return values


def _range(box: Box, axis: int) -> range:
    return range(box.offset[axis], box.offset[axis] + box.shape[axis])


def _box(ranges: Sequence[range]) -> Box:
    return Box(tuple(r.start for r in ranges), tuple(len(r) for r in ranges))
