"""Merges tensors that ranks hold in their own files to global ones, as the rules say. Pure.

Megatron-LM's `mp_rank_XX` files hold what one rank of tensor parallelism has. The rules of its
names come with keepstep: the package's file of them is read, nothing else. A rule says of a rank's
tensors that they are replicated, sliced along a dimension (a fused one part by part), or copies
that have drifted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from keepstep.checkpoint.convert.rules.expressions import ExpressionError
from keepstep.checkpoint.convert.rules.matching import match_names
from keepstep.checkpoint.convert.rules.planning import keys_by_name, shape_of
from keepstep.checkpoint.convert.rules.rank_merges import (
    ShardMerge,
    ShardSpec,
    check_other_dimensions,
    copies,
    merge_of,
    slice_of,
)
from keepstep.checkpoint.convert.rules.rule import Rule, RuleSet, Shape, Sharding
from keepstep.checkpoint.convert.rules.rule_file import parse_rules
from keepstep.checkpoint.errors import LayoutMismatch, RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.part_table import Part, PartTable
from keepstep.checkpoint.format.layout.source import TensorSpec


@dataclass(frozen=True, slots=True)
class RankRules:
    """Rules that say what each rank's own files hold, and the model's configuration for them."""

    rules: RuleSet
    config: Mapping[str, Json]


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


def join_ranks(
    given: RankRules, ranks: Sequence[Mapping[str, TensorSpec]]
) -> dict[str, ShardMerge]:
    """Return how each tensor consists of those of the ranks, under the names that these have.

    Tensors that rules are not about are copies; those that a rule drops are the first rank's that
    has them.

    Args:
        given: the rules, from the spelling of these tensors, and the model's configuration.
        ranks: what each rank of tensor parallelism holds, in the order of ranks, by key; of one
            pipeline stage.

    Raises:
        RulesInvalid: a tensor is not for exactly one rule, the rule does not say what each rank
            holds, or their shapes contradict it.
    """
    names = keys_by_name({key: spec for tensors in ranks for key, spec in tensors.items()})
    variables = given.rules.variables(given.config)
    report = match_names(given.rules, names, variables)
    report.refuse_if_incomplete(given.rules.name)
    of_rules = {key for keys in names.values() for key in keys.values()}
    others = sorted({key for tensors in ranks for key in tensors} - of_rules)
    merges = {key: _copies(key, ranks) for key in others}
    for rule, matched in report.taken:
        for keys in (names[found.name] for found in matched):
            for key in keys.values():
                if rule.drop is not None:
                    merges[key] = _copies(key, ranks, most=1)
                    continue
                specs = _specs(rule, key, ranks)
                # A step, or another value that belongs to the whole parameter, is the same on all.
                is_whole = [s.shape for s in specs] != [shape_of(keys, of) for of in ranks]
                try:
                    merges[key] = _joined(rule, specs, variables, is_whole=is_whole)
                except (ExpressionError, LayoutMismatch, ValueError) as error:
                    raise RulesInvalid(f"{rule.label}: {key}: {error}") from None
    return merges


def _copies(
    key: str, ranks: Sequence[Mapping[str, TensorSpec]], most: int | None = None
) -> ShardMerge:
    holders = [rank for rank, tensors in enumerate(ranks) if key in tensors][:most]
    return copies(holders, ranks[holders[0]][key].shape)


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


def _joined(
    rule: Rule, specs: Sequence[TensorSpec], variables: Mapping[str, int], *, is_whole: bool
) -> ShardMerge:
    """Return how a tensor consists of the ranks', all of which have it whole if `is_whole`."""
    shapes = [spec.shape for spec in specs]
    sharding = rule.source.sharding
    if is_whole or (sharding is None and len(specs) == 1):
        sharding = Sharding.REPLICATED
    if sharding is None:
        raise ExpressionError(
            f"{len(specs)} ranks have it, and the rule does not say what each holds; say "
            "replicated or average = true, or shard = dimension"
        )
    if sharding is Sharding.SHARD:
        return _sliced(rule, shapes, variables)
    return merge_of(ShardSpec(sharding=sharding), shapes)


def _sliced(rule: Rule, shapes: Sequence[Shape], variables: Mapping[str, int]) -> ShardMerge:
    """Return what slices of a dimension make up; each part of a fused one is sliced by itself."""
    stacked = {stack.axis for stack in rule.source.stacks}
    dims = [dim for dim in range(len(shapes[0])) if dim not in stacked]
    if rule.source.shard_dim >= len(dims):
        raise ExpressionError(f"there is no dimension {rule.source.shard_dim} in {shapes[0]}")
    dim = dims[rule.source.shard_dim]
    if not rule.parts or rule.source.dim != rule.source.shard_dim or len(rule.source.patterns) > 1:
        return merge_of(ShardSpec(sharding=Sharding.SHARD, dim=dim), shapes)
    table = PartTable(
        rule.source.dim,
        tuple(Part(part.name, part.size.value(variables)) for part in rule.parts),
        rule.source.interleave.value(variables),
    )
    extents = [shape[dim] for shape in shapes]
    expected = table.local_extent(len(extents))
    if any(extent != expected for extent in extents):
        sizes = ", ".join(f"{part.name} = {part.extent}" for part in table.parts)
        raise ExpressionError(
            f"each of {len(extents)} ranks is to have {expected} elements of {sizes}, but they "
            f"have {extents}"
        )
    check_other_dimensions(dim, shapes)
    return ShardMerge(
        (*shapes[0][:dim], sum(extents), *shapes[0][dim + 1 :]),
        tuple(
            slice_of(shapes[0], dim, rank, span.local_offset, span.global_offset, span.extent)
            for rank in range(len(shapes))
            for span in table.pieces(len(shapes), rank)
        ),
    )
