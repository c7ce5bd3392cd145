"""Presents tensors that ranks have in parts or copies, in their own files, as one tensor.

Pure. Which part of a rank's tensor lies where in the whole one is said by others
(`checkpoint.convert.rules.rank_merges`); here the pieces of the ranks' tensors become pieces of
the whole. Where several ranks have the same block, it is read of all of them and compared, or its
mean is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from keepstep.checkpoint.convert.read.arrays import (
    READ_NBYTES,
    Array,
    ComputedArray,
    Values,
    view_of,
)
from keepstep.checkpoint.convert.read.pieces import ForeignTensor, Piece, assembled
from keepstep.checkpoint.convert.rules.rank_merges import RankPart, ShardMerge
from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.source import TensorSpec


def joined(key: str, merge: ShardMerge, tensors: Mapping[int, ForeignTensor]) -> ForeignTensor:
    """Return the tensor that ranks have together.

    Args:
        merge: which blocks of the ranks' tensors it consists of.

    Raises:
        CheckpointDamaged: they have different data types, or do not cover the tensor.
    """
    first = tensors[merge.parts[0].rank] if merge.parts else next(iter(tensors.values()))
    spec = TensorSpec(first.spec.dtype, merge.shape)
    pieces: list[Piece] = []
    for target, parts in merge.by_target().items():
        if len(parts) == 1:
            pieces.extend(_moved(tensors[parts[0].rank], parts[0]))
            continue
        copies = tuple(array_of_box(key, tensors[part.rank], part.source) for part in parts)
        array = mean(copies) if merge.is_mean else compared(key, copies)
        pieces.append(Piece(target, array))
    return assembled(key, spec, pieces)


def array_of_box(key: str, tensor: ForeignTensor, box: Box) -> Array:
    """Return a block of a tensor as one array, whatever pieces have it."""
    for piece in tensor.pieces:
        if box.size and box.is_within(piece.box):
            return piece.array.narrow(box.within(piece.box))

    def read(wanted: Box, into: Values) -> None:
        for piece, common in _pieces_in(tensor, wanted):
            piece.array.read_into(common.within(piece.box), view_of(into, common.within(wanted)))

    sources = tuple(piece.array for piece, _ in _pieces_in(tensor, box))
    first = sources[0].location if sources else key
    return ComputedArray(tensor.spec.dtype, first, box, read, sources)


def compared(key: str, copies: Sequence[Array]) -> ComputedArray:
    """Return elements that several files have, and that have to be the same in all of them.

    Each read reads all of them, compares them by bits, and raises `CheckpointDamaged` where they
    differ.
    """
    first = copies[0]
    dtype = numpy_dtype(first.dtype)

    def read(box: Box, into: Values) -> None:
        for block in blocks(box.shape, dtype.itemsize):
            part = block.placed_in(box)
            own = view_of(into, block)
            first.read_into(part, own)
            for other in copies[1:]:
                values = np.empty(part.shape, dtype)
                other.read_into(part, values)
                # Equal bits: a NaN equals itself, and -0 is not 0.
                if values.tobytes() != own.tobytes():
                    raise CheckpointDamaged(
                        f"{other.location}: its {key} is not that of {first.location}, and "
                        "is to be a copy of it; the files are damaged, or of several runs. If they "
                        "are DeepSpeed's, and each rank has a part of its own, or trained its copy "
                        "alone, say so by rules: shard = 0, or average = true"
                    )

    return ComputedArray(first.dtype, first.location, Box.whole(first.shape), read, tuple(copies))


def mean(copies: Sequence[Array], rounded_to: str | None = None) -> ComputedArray:
    """Return the mean of copies of a tensor that ranks have trained apart.

    It is the sum in the order of the ranks, divided by their number, in 32 bits or more.
    """
    first = copies[0]
    stored, dtype = numpy_dtype(first.dtype), rounded_to or first.dtype
    wide = np.dtype(np.float64 if stored.itemsize > 4 else np.float32)

    def read(box: Box, into: Values) -> None:
        for block in blocks(box.shape, stored.itemsize):
            part = block.placed_in(box)
            total = np.zeros(part.shape, wide)
            for copy in copies:
                values = np.empty(part.shape, stored)
                copy.read_into(part, values)
                total += values.astype(wide)
            total /= wide.type(len(copies))
            with np.errstate(over="ignore", invalid="ignore"):
                view_of(into, block)[...] = total.astype(numpy_dtype(dtype))

    return ComputedArray(dtype, first.location, Box.whole(first.shape), read, tuple(copies))


def blocks(shape: Sequence[int], itemsize: int, most_nbytes: int = READ_NBYTES) -> Iterator[Box]:
    """Yield blocks that an array is cut into, each of at most `most_nbytes`, or of one element."""
    pending = [Box.whole(shape)]
    while pending:
        box = pending.pop()
        longer = [axis for axis, extent in enumerate(box.shape) if extent > 1]
        if box.size * itemsize <= most_nbytes or not longer:
            yield box
            continue
        axis = longer[0]
        half = box.shape[axis] // 2
        for start, count in ((half, box.shape[axis] - half), (0, half)):
            offset, extents = list(box.offset), list(box.shape)
            offset[axis], extents[axis] = box.offset[axis] + start, count
            pending.append(Box(tuple(offset), tuple(extents)))


def _moved(tensor: ForeignTensor, part: RankPart) -> Iterator[Piece]:
    """Yield the pieces of a block of a rank's tensor, at their places in the whole one."""
    for piece, common in _pieces_in(tensor, part.source):
        place = common.within(part.source).placed_in(part.target)
        yield Piece(place, piece.array.narrow(common.within(piece.box)))


def _pieces_in(tensor: ForeignTensor, box: Box) -> Iterable[tuple[Piece, Box]]:
    """Yield the pieces that have elements of a block, and which."""
    for piece in tensor.pieces:
        common = piece.box.intersect(box)
        if common is not None:
            yield piece, common
