"""Describes how ranks of tensor parallelism shard a parameter, and which blocks these are. Pure.

A cut is said by what a checkpoint's files have (`checkpoint.convert.read.deepspeed_cuts`) or by
rules of the user (`checkpoint.convert.rules.rank_shards`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.convert.rules.rule import Shape, Sharding
from keepstep.checkpoint.format.layout.boxes import Box


@dataclass(frozen=True, slots=True)
class RankPart:
    """A block of a rank's tensor, and the block of the whole tensor that it is.

    Attributes:
        rank: the rank.
        source: the block in the rank's tensor.
        target: the block, of the same shape, in the whole one.
    """

    rank: int
    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class ShardMerge:
    """Describes how ranks' tensors make up a tensor.

    Attributes:
        shape: of the whole tensor.
        parts: the ranks' blocks. Those with one target are copies; other targets are disjoint.
        is_mean: whether copies may differ, and their mean counts.
    """

    shape: tuple[int, ...]
    parts: tuple[RankPart, ...]
    is_mean: bool = False

    def by_target(self) -> dict[Box, tuple[RankPart, ...]]:
        """Return the parts by their blocks of the whole tensor; those without elements are not."""
        found: dict[Box, list[RankPart]] = {}
        for part in self.parts:
            if part.target.size:
                found.setdefault(part.target, []).append(part)
        return {target: tuple(parts) for target, parts in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Describes how the ranks shard a parameter.

    Attributes:
        sharding: as copies, as copies that have drifted apart, or as slices of a dimension.
        dim: the dimension that is sliced.
        widths: of a dimension of several parts, such as q, k and v, how many elements of each part
            each rank has, in each group; empty for one part.
        groups: how many times the parts alternate.
    """

    sharding: Sharding
    dim: int = 0
    widths: tuple[tuple[int, ...], ...] = ()
    groups: int = 1


REPLICATED = ShardSpec(sharding=Sharding.REPLICATED)


def check_other_dimensions(dim: int, shapes: Sequence[Shape]) -> None:
    """Refuse slices that differ in a dimension that is not sliced.

    Raises:
        ValueError: they do.
    """
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ValueError(f"slices of dimension {dim} differ in another one: {_shown(shapes)}")


def copies(ranks: Iterable[int], shape: Shape, *, is_mean: bool = False) -> ShardMerge:
    """Return a tensor that each of these ranks has whole."""
    whole = Box.whole(shape)
    return ShardMerge(shape, tuple(RankPart(rank, whole, whole) for rank in ranks), is_mean)


def slice_of(shape: Shape, dim: int, rank: int, start: int, at: int, count: int) -> RankPart:
    """Return elements of a dimension that are at `start` in a rank's tensor, and `at` in the whole.

    `shape` gives the other dimensions.
    """

    def box(first: int) -> Box:
        zeros = (0,) * len(shape)
        return Box(
            (*zeros[:dim], first, *zeros[dim + 1 :]), (*shape[:dim], count, *shape[dim + 1 :])
        )

    return RankPart(rank, box(start), box(at))


def merge_of(cut: ShardSpec, shapes: Sequence[Shape]) -> ShardMerge:
    """Return the blocks of the ranks' tensors that make up a parameter, or a slot of its shape.

    Args:
        cut: how the ranks have it.
        shapes: of the ranks' tensors.

    Raises:
        ValueError: the shapes contradict the cut, or each other; the message says how.
    """
    if cut.sharding is not Sharding.SHARD:
        if len(set(shapes)) > 1:
            raise ValueError(f"the ranks' copies of it have different shapes: {_shown(shapes)}")
        return copies(range(len(shapes)), shapes[0], is_mean=cut.sharding is Sharding.AVERAGE)
    dim = cut.dim
    if any(len(shape) <= dim for shape in shapes):
        raise ValueError(f"dimension {dim} is said to be cut, and the shapes are {_shown(shapes)}")
    check_other_dimensions(dim, shapes)
    extents = [shape[dim] for shape in shapes]
    widths = cut.widths or (tuple(extents),)
    groups = cut.groups if cut.widths else 1
    if any(len(row) != len(shapes) for row in widths):
        raise ValueError(f"{len(shapes)} ranks have it, and its parts are of other ranks: {widths}")
    held = [groups * sum(row[rank] for row in widths) for rank in range(len(shapes))]
    if held != extents:
        raise ValueError(
            f"its parts have {held} elements of dimension {dim} on the ranks, which have {extents}"
        )
    return ShardMerge(
        (*shapes[0][:dim], sum(extents), *shapes[0][dim + 1 :]),
        tuple(
            slice_of(shapes[0], dim, rank, start, at, count)
            for rank, start, at, count in _runs(widths, groups)
            if count
        ),
    )


def _runs(widths: Sequence[Sequence[int]], groups: int) -> list[tuple[int, int, int, int]]:
    """Return runs of a cut dimension: rank, place in the rank's tensor, place in the whole, length.

    In each group the whole has the first part of all ranks, then the second part of all.
    """
    ranks = len(widths[0])
    of_rank = [sum(row[rank] for row in widths) for rank in range(ranks)]
    runs = []
    for group in range(groups):
        own = [group * of_rank[rank] for rank in range(ranks)]
        at = group * sum(of_rank)
        for row in widths:
            for rank, count in enumerate(row):
                runs.append((rank, own[rank], at, count))
                own[rank] += count
                at += count
    return runs


def _shown(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(shape) for shape in dict.fromkeys(shapes))
