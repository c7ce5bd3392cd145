"""Computes where the elements of the tensors of one instance of a rule go. Pure.

An instance is what one binding of a rule's placeholders takes: the parts, and the layers or experts
that one target stacks. Every tensor of it consists of units, one part of one layer; a unit's views
are composed of three: out of the source tensor, through the transforms, into the target tensor.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.convert.rules.expressions import ExpressionError
from keepstep.checkpoint.convert.rules.matching import Matched
from keepstep.checkpoint.convert.rules.rule import PART, Reorder, Rule, Shape, Side
from keepstep.checkpoint.convert.rules.views import View, box_view, compose
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.planner import subtract

Instance = Mapping[tuple[int, tuple[int, ...]], Matched]
"""The names of an instance, by part and by the places on the target's stacked axes."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and views of an instance's targets, by name, and boxes of sources left out.

    Views are in the order of their first elements. The sources of the views are names too: the same
    views are those of each optimizer slot.
    """

    shapes: Mapping[str, Shape]
    views: Mapping[str, tuple[View, ...]]
    left_out: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """One part of one layer: its part, its shapes before and after, and the view between them."""

    part: int
    before: Shape
    after: Shape
    inside: View | None
    """None where the unit has no elements."""


def place_tensors(
    rule: Rule, instance: Instance, shapes: Mapping[str, Shape], variables: Mapping[str, int]
) -> Geometry:
    """Return where the elements of an instance's tensors go.

    Args:
        rule: read from source to target.
        instance: complete: every part of every layer that the target stacks.
        shapes: of the source's tensors, by name.
        variables: as `RuleSet.variables` returns them.

    Raises:
        ExpressionError: the rule does not fit the shapes, or a size has no value.
    """
    if rule.only_renames:
        (found,) = instance.values()
        whole = Box.whole(shapes[found.name])
        target = rule.target.patterns[0].name(found.values)
        views = (box_view(found.name, whole, whole),) if whole.size else ()
        return Geometry({target: whole.shape}, {target: views}, ())
    sizes = [part.size.value(variables) for part in rule.parts]
    counts = {
        stack.placeholder: 1 + max(places[axis] for _, places in instance)
        for axis, stack in enumerate(rule.target.stacks)
    }
    target_shapes: dict[str, Shape] = {}
    views_of: dict[str, list[View]] = defaultdict(list)
    left_out: list[tuple[str, Box]] = []
    for (part, places), found in instance.items():
        stacks = zip(rule.target.stacks, places, strict=True)
        indices = {stack.placeholder: place for stack, place in stacks}
        for unit in _units(rule, part, sizes, shapes[found.name], variables):
            shape = rule.target.whole_shape(
                unit.after, sum(sizes) if _is_fused(rule.target, sizes) else None, counts
            )
            reading = _run(rule.source, sizes, unit.part, variables)
            writing = _run(rule.target, sizes, unit.part, variables)
            pattern = rule.target.patterns[unit.part if len(rule.target.patterns) > 1 else 0]
            for chosen in _places(rule.source, shapes[found.name]):
                target = pattern.name({**found.values, **{n: str(i) for n, i in chosen.items()}})
                if target_shapes.setdefault(target, shape) != shape:
                    raise ExpressionError(
                        f"{target} would have shape {list(target_shapes[target])} by some tensors "
                        f"and {list(shape)} by {found.name}"
                    )
                if unit.inside is not None:
                    taken = rule.source.embedding(unit.before, reading, chosen)
                    placed = rule.target.embedding(unit.after, writing, indices)
                    made, lost = _unit_views(unit, unit.inside, taken.inverted(found.name), placed)
                    views_of[target] += made
                    left_out += [(found.name, box) for box in lost]
    return Geometry(
        target_shapes,
        {
            target: tuple(sorted(views_of[target], key=lambda view: view.target_offset))
            for target in target_shapes
        },
        tuple(left_out),
    )


def _unit_views(
    unit: _Unit, inside: View, taken: View, placed: View
) -> tuple[list[View], list[Box]]:
    """Return the views that put a unit in its target, and boxes of the source that none takes."""
    views = [view for step in compose(placed, inside) for view in compose(step, taken)]
    for zeros in subtract(Box.whole(unit.after), inside.target_box):
        views += compose(placed, box_view(None, zeros, zeros))
    unread = subtract(Box.whole(unit.before), inside.source_box)
    lost = [view.source_box for box in unread for view in compose(box_view(None, box, box), taken)]
    return views, lost


def _units(
    rule: Rule, part: int, sizes: Sequence[int], shape: Shape, variables: Mapping[str, int]
) -> Iterator[_Unit]:
    """Yield the units of a layer's tensor: all parts where they are fused, else its own."""
    for stack in rule.source.stacks:
        if stack.axis >= len(shape):
            raise ExpressionError(
                f"a tensor of shape {list(shape)} has no axis {stack.axis} of {stack.placeholder}"
            )
    layer = list(rule.source.unit_shape(shape))
    is_fused = _is_fused(rule.source, sizes)
    _check_parts(rule, part, sizes, layer)
    for each in range(len(sizes)) if is_fused else (part,):
        if is_fused:
            layer[rule.source.dim] = sizes[each]
        before = tuple(layer)
        after, inside = _transformed(rule, each if sizes else None, before, variables)
        yield _Unit(part=each, before=before, after=after, inside=inside)


def _transformed(
    rule: Rule, part: int | None, before: Shape, variables: Mapping[str, int]
) -> tuple[Shape, View | None]:
    """Return what the transforms make of a unit: the shape, and the view that fills it.

    Args:
        part: which part of a fused dimension the unit is; None where there are none.
        before: the unit's shape.
        variables: as `RuleSet.variables` returns them.
    """
    whole = Box.whole(before)
    shape, view = before, box_view(None, whole, whole)
    name = None
    if part is not None:
        name = rule.parts[part].name
        variables = {**variables, PART: rule.parts[part].size.value(variables)}
    for transform in rule.transforms:
        if isinstance(transform, Reorder) and not transform.is_for(name):
            continue
        shape, step = transform.apply(shape, variables)
        if whole.size and 0 not in shape:
            # Transforms permute, and cut off or add at one end: what remains is one view.
            (view,) = compose(step, view)
    return shape, view if whole.size and 0 not in shape else None


def _is_fused(side: Side, sizes: Sequence[int]) -> bool:
    return bool(sizes) and len(side.patterns) == 1


def _check_parts(rule: Rule, part: int, sizes: Sequence[int], layer: Sequence[int]) -> None:
    """Refuse a tensor whose fused dimension, or whose part, has another size than the rule says."""
    if not sizes:
        return
    dim, is_fused = rule.source.dim, _is_fused(rule.source, sizes)
    expected = sum(sizes) if is_fused else sizes[part]
    if dim < len(layer) and layer[dim] == expected:
        return
    texts = [f"{each.name} = {each.size.text}" for each in rule.parts]
    raise ExpressionError(
        f"dimension {dim} of shape {list(layer)} is to have {expected} elements by parts "
        f"{', '.join(texts if is_fused else texts[part : part + 1])}"
    )


def _run(
    side: Side, sizes: Sequence[int], part: int, variables: Mapping[str, int]
) -> tuple[int, int, int, int] | None:
    """Return the run of a part in this side's fused dimension, as `Side.embedding` takes it."""
    if not _is_fused(side, sizes):
        return None
    groups = side.interleave.value(variables)
    for size in sizes:
        if groups < 1 or size % groups:
            raise ExpressionError(
                f"a part of {size} elements is not a multiple of the {groups} groups of "
                f"interleave = {side.interleave.text!r}"
            )
    return groups, sum(sizes) // groups, sum(sizes[:part]) // groups, sizes[part] // groups


def _places(side: Side, shape: Shape) -> Iterator[dict[str, int]]:
    """Yield the places on this side's stacked axes, by placeholder."""
    axes = [range(shape[stack.axis]) for stack in side.stacks]
    names = [stack.placeholder for stack in side.stacks]
    for places in itertools.product(*axes):
        yield dict(zip(names, places, strict=True))
