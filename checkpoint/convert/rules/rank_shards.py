"""Merges tensors that ranks hold in their own files to global ones, as the rules say. Pure.

Megatron-LM's `mp_rank_XX` files hold what one rank of tensor parallelism has. The rules of its
names come with keepstep: the package's file of them is read, nothing else. A rule says of a rank's
tensors that they are replicated, sliced along a dimension (a fused one part by part), ranges of the
flattened tensor, or copies that have drifted apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files

from keepstep.checkpoint.convert.rules.expressions import ExpressionError
from keepstep.checkpoint.convert.rules.matching import match_names
from keepstep.checkpoint.convert.rules.plan import Plan, PlannedTensor, unchanged
from keepstep.checkpoint.convert.rules.planning import keys_by_name, shape_of
from keepstep.checkpoint.convert.rules.rule import Rule, RuleSet, Shape, Sharding
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.convert.rules.views import Axis, View, box_view, make_view
from keepstep.checkpoint.errors import LayoutMismatch, RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.fragments import boxes_of_range
from keepstep.checkpoint.format.layout.part_table import Part, PartSpan, PartTable
from keepstep.checkpoint.format.layout.source import TensorSpec


def megatron_ranks(*, is_gated: bool) -> RuleSet:
    """Return the rules of what Megatron's ranks of tensor parallelism hold.

    Args:
        is_gated: whether the feed-forward networks have gates, such as SwiGLU.
    """
    file = "ranks/megatron.toml"
    text = (files(__package__) / file).read_text(encoding="utf-8")
    sets = parse_rules(text, file, ("ranks", "plain", "gated"))
    networks = sets["gated" if is_gated else "plain"]
    return replace(sets["ranks"], rules=sets["ranks"].rules + networks.rules)


def rank_key(rank: int, key: str) -> str:
    """Return the name, in a plan, of a tensor in a rank's own file."""
    return f"rank/{rank}/{key}"


def join_ranks(
    rules: RuleSet,
    ranks: Sequence[Mapping[str, TensorSpec]],
    config: Mapping[str, Json],
    global_shapes: Mapping[str, Shape] | None = None,
) -> Plan:
    """Plan the global tensors, under the names that the ranks have them by.

    Tensors that rules are not about, and those that a rule drops, are the first rank's that has
    them; the former are to be equal.

    Args:
        rules: from the spelling of these tensors.
        ranks: what each rank of tensor parallelism holds, in the order of ranks, by key; of one
            pipeline stage.
        config: of the model, as for `apply`.
        global_shapes: of tensors that ranks hold fragments of, by name.

    Returns:
        A plan whose sources are named by `rank_key`.

    Raises:
        RulesInvalid: a tensor is not for exactly one rule, the rule does not say what each rank
            holds, or their shapes contradict it.
    """
    names = keys_by_name({key: spec for tensors in ranks for key, spec in tensors.items()})
    variables = rules.variables(config)
    report = match_names(rules, names, variables)
    report.refuse_if_incomplete(rules.name)
    planned: dict[str, PlannedTensor] = {}
    equal: list[tuple[str, ...]] = []
    mean: list[tuple[str, ...]] = []
    of_rules = {key for keys in names.values() for key in keys.values()}
    for key in sorted({key for tensors in ranks for key in tensors} - of_rules):
        holders = [rank for rank, tensors in enumerate(ranks) if key in tensors]
        planned[key] = _as_it_is(key, holders[0], ranks)
        equal.append(tuple(rank_key(rank, key) for rank in holders))
    for rule, matched in report.taken:
        for found in matched:
            keys = names[found.name]
            if rule.drop is not None:
                for key in keys.values():
                    first = next(rank for rank, tensors in enumerate(ranks) if key in tensors)
                    planned[key] = _as_it_is(key, first, ranks)
                continue
            specs_by_key = {key: _specs(rule, key, ranks) for key in keys.values()}
            parameter = [shape_of(keys, tensors) for tensors in ranks]
            for key, specs in specs_by_key.items():
                everywhere = tuple(rank_key(rank, key) for rank in range(len(ranks)))
                sharding = rule.source.sharding
                if sharding is None and len(ranks) == 1:
                    sharding = Sharding.REPLICATED
                if [spec.shape for spec in specs] != parameter:
                    # A step, or another value that belongs to the whole parameter.
                    sharding = Sharding.REPLICATED
                try:
                    shape, views = _joined(
                        rule, sharding, specs, (global_shapes or {}).get(found.name), variables
                    )
                except (ExpressionError, LayoutMismatch, ValueError) as error:
                    raise RulesInvalid(f"{rule.label}: {key}: {error}") from None
                planned[key] = PlannedTensor(
                    TensorSpec(specs[0].dtype, shape),
                    tuple(view for rank, part in views for view in _of_rank(rank, key, part)),
                )
                if sharding is Sharding.REPLICATED:
                    equal.append(everywhere)
                elif sharding is Sharding.AVERAGE:
                    mean.append(everywhere)
    several = [tuple(keys for keys in groups if len(keys) > 1) for groups in (equal, mean)]
    return Plan(tensors=planned, equal=several[0], mean=several[1])


def _as_it_is(key: str, rank: int, ranks: Sequence[Mapping[str, TensorSpec]]) -> PlannedTensor:
    """Return the tensor that a rank has of a key."""
    return unchanged(rank_key(rank, key), ranks[rank][key])


def _specs(rule: Rule, key: str, ranks: Sequence[Mapping[str, TensorSpec]]) -> list[TensorSpec]:
    lacking = [rank for rank, tensors in enumerate(ranks) if key not in tensors]
    if lacking:
        raise RulesInvalid(
            f"{rule.label}: rank {lacking[0]} has no {key}, which other ranks have; pass the ranks "
            "of one pipeline stage, all of them"
        )
    specs = [tensors[key] for tensors in ranks]
    if len({spec.dtype for spec in specs}) > 1:
        raise RulesInvalid(f"{rule.label}: {key}: the ranks have different data types")
    return specs


_Views = list[tuple[int, tuple[View, ...]]]


def _joined(
    rule: Rule,
    sharding: Sharding | None,
    specs: Sequence[TensorSpec],
    global_shape: Shape | None,
    variables: Mapping[str, int],
) -> tuple[Shape, _Views]:
    """Return the global shape, and views of each rank's tensor that together fill it."""
    shapes = [spec.shape for spec in specs]
    match sharding:
        case None:
            raise ExpressionError(
                f"{len(specs)} ranks have it, and the rule does not say what each holds; say "
                "replicated, fragments or average = true, or shard = dimension"
            )
        case Sharding.SHARD:
            return _sliced(rule, shapes, variables)
        case Sharding.FRAGMENTS:
            return _fragments(shapes, global_shape)
        case _:
            if len(set(shapes)) > 1:
                raise ExpressionError(f"the ranks' copies have different shapes: {shapes}")
            whole = Box.whole(shapes[0])
            views = (box_view("", whole, whole),) if whole.size else ()
            return shapes[0], [(0, views)]


def _sliced(
    rule: Rule, shapes: Sequence[Shape], variables: Mapping[str, int]
) -> tuple[Shape, _Views]:
    """Return what slices of a dimension make up; each part of a fused one is sliced by itself."""
    stacked = {stack.axis for stack in rule.source.stacks}
    dims = [dim for dim in range(len(shapes[0])) if dim not in stacked]
    if rule.source.shard_dim >= len(dims):
        raise ExpressionError(f"there is no dimension {rule.source.shard_dim} in {shapes[0]}")
    dim = dims[rule.source.shard_dim]
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ExpressionError(f"slices of dimension {dim} have other shapes: {shapes}")
    extents = [shape[dim] for shape in shapes]
    pieces = _pieces(rule, extents, variables)
    whole = list(shapes[0])
    whole[dim] = sum(extents)
    views: _Views = []
    for rank, shape in enumerate(shapes):
        boxes = []
        for piece in pieces[rank]:
            offset, target_offset, part = [0] * len(shape), [0] * len(shape), list(shape)
            offset[dim], target_offset[dim] = piece.local_offset, piece.global_offset
            part[dim] = piece.extent
            if math.prod(part):
                source = Box(tuple(offset), tuple(part))
                boxes.append(box_view("", Box(tuple(target_offset), tuple(part)), source))
        views.append((rank, tuple(boxes)))
    return tuple(whole), views


def _pieces(
    rule: Rule, extents: Sequence[int], variables: Mapping[str, int]
) -> list[tuple[PartSpan, ...]]:
    """Return which elements of the sliced dimension each rank holds."""
    if not rule.parts or rule.source.dim != rule.source.shard_dim or len(rule.source.patterns) > 1:
        starts = itertools.accumulate(extents, initial=0)
        return [
            (PartSpan(0, start, extent),) for start, extent in zip(starts, extents, strict=False)
        ]
    table = PartTable(
        rule.source.dim,
        tuple(Part(part.name, part.size.value(variables)) for part in rule.parts),
        rule.source.interleave.value(variables),
    )
    expected = table.local_extent(len(extents))
    if any(extent != expected for extent in extents):
        sizes = ", ".join(f"{part.name} = {part.extent}" for part in table.parts)
        raise ExpressionError(
            f"each of {len(extents)} ranks is to have {expected} elements of {sizes}, but they "
            f"have {list(extents)}"
        )
    return [table.pieces(len(extents), rank) for rank in range(len(extents))]


def _fragments(shapes: Sequence[Shape], global_shape: Shape | None) -> tuple[Shape, _Views]:
    """Return what ranges of the flattened tensor make up, one after the other by rank."""
    if global_shape is None:
        raise ExpressionError("its global shape is not known, which fragments do not tell")
    size = math.prod(global_shape)
    extents = [math.prod(shape) for shape in shapes]
    if any(len(shape) != 1 for shape in shapes) or sum(extents) != size:
        raise ExpressionError(
            f"fragments of shapes {list(shapes)} are not {size} elements in a row, those of shape "
            f"{list(global_shape)}"
        )
    views: _Views = []
    start = 0
    for rank, extent in enumerate(extents):
        views.append((rank, tuple(_range_views(global_shape, start, start + extent))))
        start += extent
    return global_shape, views


def _range_views(shape: Shape, start: int, stop: int) -> Iterator[View]:
    position = 0
    for box in boxes_of_range(shape, start, stop):
        axes = [
            Axis(extent, dim, 1, 0, math.prod(box.shape[dim + 1 :]))
            for dim, extent in enumerate(box.shape)
        ]
        yield make_view("", box.offset, (position,), axes)
        position += box.size


def _of_rank(rank: int, key: str, views: Sequence[View]) -> tuple[View, ...]:
    return tuple(
        View(
            source=rank_key(rank, key),
            target_offset=view.target_offset,
            source_offset=view.source_offset,
            axes=view.axes,
        )
        for view in views
    )
