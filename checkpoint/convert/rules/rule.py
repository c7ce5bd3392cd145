"""Describes a rule: which tensors of one spelling are which tensors of another. Pure values.

A rule relates two sides, each a family of names with what these tensors are: one tensor for each
part or one fused of all, one for each layer or expert or one stacked of all. Between them stands
the unit, one part of one layer, and what is done to it. Nothing in a rule says which side is
read, so a rule turned around is a rule.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.checkpoint.convert.rules.expressions import (
    Definition,
    Expression,
    ExpressionError,
    variables_of,
)
from keepstep.checkpoint.convert.rules.name_patterns import NamePattern
from keepstep.checkpoint.convert.rules.views import Axis, View, box_view, make_view
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Box, Json

Shape = tuple[int, ...]

_NOT_INTERLEAVED = Expression("1")

PART = "part"
"""The variable that has the size of the part at hand, in the shape of a `Reorder`."""


class Sharding(enum.Enum):
    """Names how ranks of tensor parallelism hold a tensor, each in files of its own."""

    REPLICATED = "replicated"
    """All ranks hold the same."""
    SHARD = "shard"
    """The ranks hold slices of one dimension; each part of a fused one is sliced by itself."""
    AVERAGE = "average"
    """The ranks hold copies that have drifted apart; their mean counts."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A placeholder of the other side's names that is an axis of this side's tensors."""

    axis: int
    placeholder: str


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One part of a fused dimension, and its size in elements, in all groups together."""

    name: str
    size: Expression


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a rule.

    Args:
        patterns: names of its tensors: one, or one for each part.
        also: other names that the tensor may be read under; it is written under its pattern.
        stacks: the axes that are placeholders of the other side, by their place in the tensor.
        dim: the fused dimension, counted without the stacked axes.
        interleave: the number of groups by which the parts alternate.
        sharding: what ranks hold of it; None where nothing is known, or no rank has its own files.
        shard_dim: the dimension that is sliced, counted without the stacked axes.
    """

    patterns: tuple[NamePattern, ...]
    also: tuple[NamePattern, ...] = ()
    stacks: tuple[Stack, ...] = ()
    dim: int = 0
    interleave: Expression = _NOT_INTERLEAVED
    sharding: Sharding | None = None
    shard_dim: int = 0

    def unit_shape(self, shape: Shape) -> Shape:
        """Return the shape of one layer's or expert's tensor of a stacked one."""
        axes = {stack.axis for stack in self.stacks}
        return tuple(extent for dim, extent in enumerate(shape) if dim not in axes)

    def whole_shape(self, unit: Shape, fused: int | None, counts: Mapping[str, int]) -> Shape:
        """Return the shape of this side's tensor.

        Args:
            unit: shape of one part of one layer.
            fused: size of the fused dimension, if the parts are fused here.
            counts: how many layers or experts there are, by placeholder.
        """
        shape = list(unit)
        if fused is not None:
            shape[self.dim] = fused
        for stack in self.stacks:
            shape.insert(stack.axis, counts[stack.placeholder])
        return tuple(shape)

    def embedding(
        self, unit: Shape, run: tuple[int, int, int, int] | None, indices: Mapping[str, int]
    ) -> View:
        """Return the view that places a unit in this side's tensor.

        Args:
            run: of a part in the fused dimension: groups, extent of all parts in a group, offset
                and extent of this part in a group. None where the parts are not fused.
            indices: which layer or expert it is, by placeholder.
        """
        axes_of_stacks = {stack.axis: stack for stack in self.stacks}
        rank = len(unit) + len(self.stacks)
        dims = [dim for dim in range(rank) if dim not in axes_of_stacks]
        offset = [0] * rank
        for axis, stack in axes_of_stacks.items():
            offset[axis] = indices[stack.placeholder]
        axes = []
        for dim, extent in enumerate(unit):
            if run is not None and dim == self.dim:
                groups, period, start, length = run
                offset[dims[dim]] = start
                axes.append(Axis(groups, dims[dim], period, dim, length))
                axes.append(Axis(length, dims[dim], 1, dim, 1))
            else:
                axes.append(Axis(extent, dims[dim], 1, dim, 1))
        return make_view(None, offset, (0,) * len(unit), axes)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Dimension i of the result is dimension `order[i]` of the unit."""

    order: tuple[int, ...]

    @property
    def inverted(self) -> Transpose:
        """The transposition back."""
        return Transpose(_inverse(self.order))

    def apply(self, shape: Shape, variables: Mapping[str, int]) -> tuple[Shape, View]:
        """Return the shape of the result, and the view that fills it.

        Raises:
            ExpressionError: the unit has another number of dimensions.
        """
        if len(shape) != len(self.order):
            raise ExpressionError(
                f"transpose = {list(self.order)} does not fit a tensor of shape {list(shape)}"
            )
        after = tuple(shape[dim] for dim in self.order)
        axes = [Axis(shape[dim], place, 1, dim, 1) for place, dim in enumerate(self.order)]
        zeros = (0,) * len(shape)
        return after, make_view(None, zeros, zeros, axes)


@dataclass(frozen=True, slots=True)
class Reorder:
    """A dimension is seen as a grid of this shape, whose axes are then permuted.

    The permutation between rotary halves and rotary pairs is one: the rows of
    [heads, 2, head_dim / 2] become those of [heads, head_dim / 2, 2].

    Args:
        dim: the dimension.
        shape: the grid's.
        order: of its axes in the result.
        parts: names of the parts of a fused dimension that are permuted; None for all.
    """

    dim: int
    shape: tuple[Expression, ...]
    order: tuple[int, ...]
    parts: frozenset[str] | None = None

    @property
    def inverted(self) -> Reorder:
        """The permutation back."""
        shape = tuple(self.shape[dim] for dim in self.order)
        return replace(self, shape=shape, order=_inverse(self.order))

    def is_for(self, part: str | None) -> bool:
        """Return whether a part is permuted; None is the whole dimension."""
        return self.parts is None or part in self.parts

    def apply(self, shape: Shape, variables: Mapping[str, int]) -> tuple[Shape, View]:
        """Return the shape of the result, which is the unit's, and the view that fills it.

        Raises:
            ExpressionError: the grid has another size than the dimension.
        """
        grid = tuple(size.value(variables) for size in self.shape)
        strides = _strides(grid)
        if self.dim >= len(shape) or strides[0] * grid[0] != shape[self.dim]:
            texts = ", ".join(size.text for size in self.shape)
            raise ExpressionError(
                f"reorder: [{texts}] is {list(grid)}, which does not fit dimension {self.dim} of "
                f"a tensor of shape {list(shape)}"
            )
        axes = [Axis(extent, dim, 1, dim, 1) for dim, extent in enumerate(shape) if dim != self.dim]
        after = _strides(tuple(grid[axis] for axis in self.order))
        for place, axis in enumerate(self.order):
            axes.append(Axis(grid[axis], self.dim, after[place], self.dim, strides[axis]))
        zeros = (0,) * len(shape)
        return shape, make_view(None, zeros, zeros, axes)


@dataclass(frozen=True, slots=True)
class Resize:
    """A dimension of `before` elements becomes one of `after`: the rest is cut off, or zeros."""

    dim: int
    before: Expression
    after: Expression

    @property
    def inverted(self) -> Resize:
        """The way back, which brings back zeros for what was cut off."""
        return Resize(self.dim, self.after, self.before)

    def apply(self, shape: Shape, variables: Mapping[str, int]) -> tuple[Shape, View]:
        """Return the shape of the result, and the view that fills it but for its padding.

        Raises:
            ExpressionError: the dimension has another size than the rule says.
        """
        before, after = self.before.value(variables), self.after.value(variables)
        if self.dim >= len(shape) or shape[self.dim] != before:
            raise ExpressionError(
                f"pad: {self.before.text!r} is {before}, but dimension {self.dim} of a tensor of "
                f"shape {list(shape)} is to have that size"
            )
        resized, common = list(shape), list(shape)
        resized[self.dim], common[self.dim] = after, min(before, after)
        kept = Box.whole(common)
        return tuple(resized), box_view(None, kept, kept)


Transform = Transpose | Reorder | Resize


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule.

    Args:
        place: file and line of the rule, `name:line`.
        source: the side that is read.
        target: the side that is written.
        parts: what a fused dimension consists of, if one is split, merged or rearranged.
        transforms: what is done to a unit, in this order.
        ranges: bounds of placeholders that are numbers, as (first, end), for rules that hold for
            some layers only.
        drop: why the tensors are left out; None for those that are not.
        is_one_way: another rule makes the tensors of the target's names on the way back.
    """

    place: str
    source: Side
    target: Side
    parts: tuple[FusedPart, ...] = ()
    transforms: tuple[Transform, ...] = ()
    ranges: tuple[tuple[str, Expression, Expression | None], ...] = ()
    drop: str | None = None
    is_one_way: bool = False

    @property
    def label(self) -> str:
        """File, line and pattern, to begin a message or a line of a table with."""
        return f"{self.place}: {' + '.join(pattern.text for pattern in self.source.patterns)}"

    @property
    def only_renames(self) -> bool:
        """Whether each tensor stays as it is, whatever its shape."""
        return not (self.parts or self.transforms or self.source.stacks or self.target.stacks)

    @property
    def inverted(self) -> Rule:
        """The rule that leads back."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            transforms=tuple(transform.inverted for transform in reversed(self.transforms)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """The rules from one spelling to another.

    Args:
        name: of the file they stand in.
        rules: each tensor is for exactly one of them; `{name...}` alone takes what is left.
        definitions: the variables of their sizes, as for `variables_of`.
    """

    name: str
    rules: tuple[Rule, ...]
    definitions: Mapping[str, Definition]

    @property
    def inverted(self) -> RuleSet:
        """The rules that lead back. Tensors that rules left out do not come back."""
        both_ways = [rule for rule in self.rules if rule.drop is None and not rule.is_one_way]
        return replace(self, rules=tuple(rule.inverted for rule in both_ways))

    def variables(self, config: Mapping[str, Json]) -> dict[str, int]:
        """Return the variables of the sizes for a model's configuration.

        Raises:
            RulesInvalid: a definition has no value for it, such as heads that do not divide.
        """
        try:
            return variables_of(self.definitions, config)
        except ExpressionError as error:
            raise RulesInvalid(
                f"{error}; correct the definition, or pass the configuration of this checkpoint"
            ) from None


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the distance of neighbours along each axis of a grid in C order."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda place: order[place]))
