"""Computes the box, or the boxes, of a rank's shard from placements, mesh shape and coordinate.

Pure (torch's placement types are values): it uses no device mesh and does no communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.part_table import PartTable
from keepstep.torch_internals import strided_shard


def local_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """Return the box of a sharded tensor that one rank holds.

    Each sharded dimension is split as `torch.chunk` does: pieces of ceil(n / parts), the last ones
    smaller or empty. Mesh axes split from left to right. A strided shard (FSDP over tensor
    parallelism) splits each of the `split_factor` pieces that it finds. If the axes to its right
    make as many, it was applied after them, to the piece that each rank had then.

    Args:
        shape: global shape of the tensor.
        mesh_shape: sizes of the mesh's axes.
        coordinate: this rank's place in the mesh.
        placements: one per mesh axis.

    Raises:
        LayoutMismatch: the rank's elements are not one box, such as a pending sum (`Partial`).
    """
    # A model has many tensors of few shapes, and every save asks for each. Types are compared, too:
    # whether a shard and a strided shard of the same dimension are equal is up to PyTorch.
    kinds = tuple(map(type, placements))
    return _local_box(tuple(shape), tuple(mesh_shape), tuple(coordinate), tuple(placements), kinds)


@lru_cache(maxsize=4096)
def _local_box(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    _kinds: tuple[type[Placement], ...],
) -> Box:
    ranges = []
    for extent, splits in zip(
        shape, _splits(len(shape), mesh_shape, coordinate, placements), strict=True
    ):
        pieces = _pieces(range(extent), splits)
        if len(pieces) > 1:
            raise LayoutMismatch(
                f"a tensor of shape {shape} placed as {placements} over a mesh of "
                f"{mesh_shape} is held in several pieces per rank and cannot be stored; "
                "redistribute it first"
            )
        ranges += pieces
    return Box(tuple(r.start for r in ranges), tuple(len(r) for r in ranges))


def local_boxes_of_parts(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    *,
    table: PartTable,
    mesh_axis: int,
) -> tuple[Box, ...]:
    """Return the boxes of a tensor of fused parts that one rank holds, in their local order.

    Locally they lie one after the other along the fused dimension. Every part is sliced by one mesh
    axis, tensor parallelism's; others split the results, as FSDP does.

    Args:
        shape: the tensor's shape as torch has it, in which the ranks' shards are put together.
        mesh_shape: as for `local_box`.
        coordinate: as for `local_box`.
        placements: as for `local_box`.
        table: the parts; it gives the extent of the unsharded dimension.
        mesh_axis: the mesh axis that slices the parts.

    Raises:
        LayoutMismatch: a part cannot be cut evenly, the shape contradicts the table, or another
            mesh axis splits the parts first.
    """
    degree, number = mesh_shape[mesh_axis], coordinate[mesh_axis]
    whole = table.local_extent(degree) * degree
    if shape[table.axis] != whole:
        raise LayoutMismatch(
            f"dimension {table.axis} of a tensor of shape {tuple(shape)} has the slices of "
            f"{degree} ranks; with these parts they have {whole} elements together; correct the "
            "part table"
        )
    if degree == 1:
        return (local_box(shape, mesh_shape, coordinate, placements),)
    splits = _splits(len(shape), mesh_shape, coordinate, placements)[table.axis]
    ordered = _in_order_of_application(splits)
    if not _are_from_right_to_left(splits) or ordered[0].mesh_axis != mesh_axis:
        raise LayoutMismatch(
            f"a tensor placed as {tuple(placements)} is split before tensor parallelism slices its "
            "parts, and cannot be stored; apply tensor parallelism first"
        )
    own_range = range(table.local_extent(degree))
    for split in ordered[1:]:
        own_range = _chunk(own_range, split.parts, split.number)
    others = [n if axis != table.axis else 0 for axis, n in enumerate(shape)]
    box = local_box(
        others,
        mesh_shape,
        coordinate,
        [p if _dimension(p, len(shape)) != table.axis else Replicate() for p in placements],
    )
    boxes = []
    for piece in table.pieces(degree, number):
        start = max(piece.local_offset, own_range.start)
        stop = min(piece.local_offset + piece.extent, own_range.stop)
        if start < stop:
            offset, extents = list(box.offset), list(box.shape)
            offset[table.axis] = piece.global_offset + start - piece.local_offset
            extents[table.axis] = stop - start
            boxes.append(Box(tuple(offset), tuple(extents)))
    return tuple(boxes)


class _Split(NamedTuple):
    """A mesh axis that splits a dimension into `parts`, and this rank's place along it.

    `factor` is the number of pieces that are split one by one; 1 for a plain shard.
    """

    parts: int
    number: int
    factor: int
    mesh_axis: int


def _splits(
    dimensions: int,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[list[_Split]]:
    """Return the splits of each dimension, from the left to the right of the mesh's axes."""
    splits: list[list[_Split]] = [[] for _ in range(dimensions)]
    for axis, (parts, number, placement) in enumerate(
        zip(mesh_shape, coordinate, placements, strict=True)
    ):
        if isinstance(placement, Replicate):
            continue
        dimension = _dimension(placement, dimensions)
        if isinstance(placement, Partial) or dimension is None:
            raise LayoutMismatch(
                f"a tensor placed as {placement} cannot be stored; redistribute it first"
            )
        factor = int(placement.split_factor) if isinstance(placement, strided_shard()) else 1
        splits[dimension].append(_Split(parts, number, factor, axis))
    return splits


def _dimension(placement: Placement, dimensions: int) -> int | None:
    """Return the dimension of a tensor that a placement splits; None if it splits none."""
    if isinstance(placement, (Shard, strided_shard())):
        return int(placement.dim % dimensions)
    return None


def _pieces(extent: range, splits: Sequence[_Split]) -> list[range]:
    """Return a rank's ranges of a dimension, in ascending order; one empty range for none."""
    if _are_from_right_to_left(splits):
        for split in _in_order_of_application(splits):
            extent = _chunk(extent, split.parts, split.number)
        return [extent]
    pieces = [extent]
    for split in splits:
        size = sum(map(len, pieces))
        chunks = [_chunk(range(size), split.factor, number) for number in range(split.factor)]
        wanted = [_chunk(chunk, split.parts, split.number) for chunk in chunks]
        pieces = [piece for chosen in wanted for piece in _select(pieces, chosen)]
    return _merged(pieces) or [range(extent.stop, extent.stop)]


def _are_from_right_to_left(splits: Sequence[_Split]) -> bool:
    """Return whether each strided split finds the pieces that those to its right have made."""
    return all(
        split.factor in (1, math.prod(other.parts for other in splits[position + 1 :]))
        for position, split in enumerate(splits)
    )


def _in_order_of_application(splits: Sequence[_Split]) -> list[_Split]:
    if not splits:
        return []
    first, rest = splits[0], _in_order_of_application(splits[1:])
    return [first, *rest] if first.factor == 1 else [*rest, first]


def _chunk(extent: range, parts: int, number: int) -> range:
    """Return one piece as `torch.chunk` makes it, an empty one after the last."""
    size = ceil_div(len(extent), parts)
    start = min(extent.start + size * number, extent.stop)
    return range(start, min(start + size, extent.stop))


def _select(pieces: Sequence[range], chosen: range) -> Iterator[range]:
    """Yield the parts of pieces, put one after the other, at the places that are chosen."""
    begin = 0
    for piece in pieces:
        first = max(chosen.start - begin, 0)
        last = min(chosen.stop - begin, len(piece))
        if last > first:
            yield piece[first:last]
        begin += len(piece)


def _merged(pieces: Sequence[range]) -> list[range]:
    """Return pieces without those that only continue another."""
    merged: list[range] = []
    for piece in pieces:
        if merged and merged[-1].stop == piece.start:
            merged[-1] = range(merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return merged
