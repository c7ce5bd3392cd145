"""Says how ranks of tensor parallelism shard a parameter, and which blocks these are.

Pure. A cut is said by what a checkpoint's files have (`checkpoint.convert.read.deepspeed_cuts`)
or by rules of the user, which `joinings_by_rules` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.convert.read.rank_tensors import RankPart, ShardMerge
from keepstep.checkpoint.convert.rules.plan import PlannedTensor
from keepstep.checkpoint.convert.rules.rank_shards import join_ranks, rank_key
from keepstep.checkpoint.convert.rules.rule import RuleSet, Shape, Sharding
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.source import TensorSpec


@dataclass(frozen=True, slots=True)
class RankRules:
    """Rules that say what each rank's own files hold, and the model's configuration for them."""

    rules: RuleSet
    config: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Describes how the ranks shard a parameter.

    Attributes:
        sharding: as copies, as copies that have drifted apart, or as slices of a dimension.
        dim: the dimension that is sliced.
        widths: of a dimension of several parts, such as q, k and v, how many elements of each part
            each rank has, in each group; empty for one part, of which a rank has all it holds.
        groups: how many times the parts alternate.
    """

    sharding: Sharding
    dim: int = 0
    widths: tuple[tuple[int, ...], ...] = ()
    groups: int = 1


REPLICATED = ShardSpec(sharding=Sharding.REPLICATED)


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
        whole = Box.whole(shapes[0])
        parts = tuple(RankPart(rank, whole, whole) for rank in range(len(shapes)))
        return ShardMerge(shapes[0], parts, cut.sharding is Sharding.AVERAGE)
    dim = cut.dim
    if any(len(shape) <= dim for shape in shapes):
        raise ValueError(f"dimension {dim} is said to be cut, and the shapes are {_shown(shapes)}")
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ValueError(f"slices of dimension {dim} differ in another one: {_shown(shapes)}")
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
            RankPart(rank, _slice(shapes[0], dim, start, count), _slice(shapes[0], dim, at, count))
            for rank, start, at, count in _runs(widths, groups)
            if count
        ),
    )


def joinings_by_rules(
    given: RankRules, ranks: Sequence[Mapping[str, TensorSpec]]
) -> dict[str, ShardMerge]:
    """Return how each tensor of a pipeline stage consists of those of its ranks, as rules say.

    Args:
        given: the rules.
        ranks: the tensors of each rank, by key; only those of the model and its optimizer.

    Raises:
        RulesInvalid: the rules do not fit the tensors.
    """
    plan = join_ranks(given.rules, ranks, given.config)
    equal = {_key(keys[0]) for keys in plan.equal}
    mean = {_key(keys[0]) for keys in plan.mean}
    merges = {}
    for key, tensor in plan.tensors.items():
        parts = _parts(tensor)
        if key in equal | mean:
            # The plan names the first rank's only.
            parts = tuple(
                RankPart(rank, part.source, part.target)
                for rank, specs in enumerate(ranks)
                if key in specs
                for part in parts
            )
        merges[key] = ShardMerge(tensor.spec.shape, parts, key in mean)
    return merges


def _parts(tensor: PlannedTensor) -> tuple[RankPart, ...]:
    found = []
    for view in tensor.views:
        assert view.source is not None, "ranks' tensors are joined without padding"
        rank = int(view.source.split("/", 2)[1])
        for copy in view.box_copies():
            if len(copy.source.shape) != len(copy.target.shape):
                raise RulesInvalid(
                    f"{view.source}: ranges of flattened tensors cannot be joined from files of "
                    "ranks here; leave `fragments` out of the rules"
                )
            found.append(RankPart(rank, copy.source, copy.target))
    return tuple(found)


def _key(name: str) -> str:
    """Return the key of a tensor in a rank's own file, from its name in a plan."""
    return name.removeprefix(rank_key(int(name.split("/", 2)[1]), ""))


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


def _slice(shape: Shape, dim: int, start: int, count: int) -> Box:
    offset, extents = [0] * len(shape), list(shape)
    offset[dim], extents[dim] = start, count
    return Box(tuple(offset), tuple(extents))


def _shown(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(shape) for shape in dict.fromkeys(shapes))
