"""Applies rules to the tensors of a checkpoint, which gives the plan of its renaming. Pure.

Keys are those of keepstep's checkpoints: `model/<name>` for parameters and buffers,
`optim/<name>/<slot>` for optimizer state. State follows its parameter: a slot of the parameter's
shape is cut, joined and turned as the parameter is; a slot of one element, such as `step`, is only
renamed; others are renamed where the rule does no more than that, and else left out and listed.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from keepstep.checkpoint.convert.rules.expressions import ExpressionError
from keepstep.checkpoint.convert.rules.geometry import Geometry, Instance, place_tensors
from keepstep.checkpoint.convert.rules.matching import Matched, match_names
from keepstep.checkpoint.convert.rules.plan import LeftOut, Plan, PlannedTensor, unchanged
from keepstep.checkpoint.convert.rules.rule import Rule, RuleSet, Shape
from keepstep.checkpoint.convert.rules.views import View
from keepstep.checkpoint.errors import RulesInvalid
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.source import TensorSpec

_MODEL, _OPTIMIZER = "model/", "optim/"
_SHOWN = 8


def apply(rules: RuleSet, tensors: Mapping[str, TensorSpec], config: Mapping[str, Json]) -> Plan:
    """Plan the checkpoint that the rules make of another.

    Args:
        rules: from the spelling of these tensors to the wanted one.
        tensors: those of the source, by key. Keys that begin with neither `model/` nor `optim/`
            are carried as they are.
        config: of the model, as `variables_of` takes it.

    Raises:
        RulesInvalid: a tensor is not for exactly one rule, a rule contradicts the configuration or
            the shapes, layers or parts are missing, or two tensors would get one name. The message
            names file, line and tensor.
    """
    names = keys_by_name(tensors)
    variables = rules.variables(config)
    report = match_names(rules, names, variables)
    report.refuse_if_incomplete(rules.name)
    planned = {
        key: unchanged(key, spec)
        for key, spec in tensors.items()
        if not key.startswith((_MODEL, _OPTIMIZER))
    }
    left_out: list[LeftOut] = []
    equal: list[tuple[str, ...]] = []
    made_by: dict[str, Rule] = {}
    for rule, matched in report.taken:
        if rule.drop is not None:
            for found in matched:
                for key in names[found.name].values():
                    left_out.append(LeftOut(key, Box.whole(tensors[key].shape), rule.drop))
            continue
        for instance in _instances(rule, matched):
            shapes = {
                found.name: shape_of(names[found.name], tensors) for found in instance.values()
            }
            try:
                geometry = place_tensors(rule, instance, shapes, variables)
            except ExpressionError as error:
                raise RulesInvalid(
                    f"{rule.label}: {', '.join(list(shapes)[:_SHOWN])}: {error}; correct the rule, "
                    "or pass the configuration of this checkpoint"
                ) from None
            plan = _instance_plan(rule, geometry, names, shapes, tensors)
            for key, tensor in plan.tensors.items():
                if key in planned:
                    other = made_by.get(key)
                    raise RulesInvalid(
                        f"{rule.label}: {key} is made from {_first_source(tensor)}, and already "
                        f"from {_first_source(planned[key])}"
                        + (f" by {other.label}" if other is not None else "")
                        + "; leave one of them out, or rename it otherwise"
                    )
                planned[key] = tensor
                made_by[key] = rule
            left_out += plan.left_out
            equal += plan.equal
    return Plan(tensors=planned, left_out=tuple(left_out), equal=tuple(equal))


def names_of(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """Return the names that rules are about: of the model's tensors, and of their state."""
    return sorted(keys_by_name(tensors))


def keys_by_name(tensors: Mapping[str, TensorSpec]) -> dict[str, dict[str | None, str]]:
    """Return the keys of each name: the model's under None, and one for each slot.

    Raises:
        RulesInvalid: a key of the optimizer names no slot.
    """
    names: dict[str, dict[str | None, str]] = defaultdict(dict)
    for key in tensors:
        if key.startswith(_MODEL):
            names[key.removeprefix(_MODEL)][None] = key
        elif key.startswith(_OPTIMIZER):
            name, _, slot = key.removeprefix(_OPTIMIZER).rpartition("/")
            if not name:
                raise RulesInvalid(
                    f"{key}: the key of an optimizer's tensor is optim/<parameter>/<slot>"
                )
            names[name][slot] = key
    return dict(names)


def shape_of(keys: Mapping[str | None, str], tensors: Mapping[str, TensorSpec]) -> Shape:
    """Return a parameter's shape: that of its largest slot where the model is not there."""
    if None in keys:
        return tensors[keys[None]].shape
    return max((tensors[key].shape for key in keys.values()), key=lambda shape: math.prod(shape))


def _instances(rule: Rule, matched: tuple[Matched, ...]) -> Iterator[Instance]:
    """Yield the names that belong together: the parts of all layers that one target stacks."""
    stacked = [stack.placeholder for stack in rule.target.stacks]
    instances: dict[tuple[tuple[str, str], ...], dict[tuple[int, tuple[int, ...]], Matched]] = (
        defaultdict(dict)
    )
    for found in matched:
        key = tuple(sorted(item for item in found.values.items() if item[0] not in stacked))
        place = (found.part, tuple(int(found.values[name]) for name in stacked))
        if place in instances[key]:
            raise RulesInvalid(
                f"{rule.label}: {instances[key][place].name} and {found.name} are two names of "
                "one tensor; leave one of them out"
            )
        instances[key][place] = found
    for instance in instances.values():
        counts = [1 + max(place[1][axis] for place in instance) for axis in range(len(stacked))]
        expected = itertools.product(
            range(len(rule.source.patterns)), itertools.product(*map(range, counts))
        )
        if len(instance) != len(rule.source.patterns) * math.prod(counts):
            part, indices = next(place for place in expected if place not in instance)
            values = dict(next(iter(instance.values())).values)
            values |= {name: str(index) for name, index in zip(stacked, indices, strict=True)}
            raise RulesInvalid(
                f"{rule.label}: {rule.source.patterns[part].name(values)} is missing, though there "
                f"is {next(iter(instance.values())).name}; the checkpoint is incomplete, or the "
                "rule is for another model"
            )
        yield instance


def _instance_plan(
    rule: Rule,
    geometry: Geometry,
    names: Mapping[str, Mapping[str | None, str]],
    shapes: Mapping[str, Shape],
    tensors: Mapping[str, TensorSpec],
) -> Plan:
    """Return the plan of an instance's tensors in the model and in every slot."""
    planned: dict[str, PlannedTensor] = {}
    left_out: list[LeftOut] = []
    equal: list[tuple[str, ...]] = []
    for slot in sorted({slot for name in shapes for slot in names[name]}, key=lambda s: s or ""):
        lacking = [name for name in shapes if slot not in names[name]]
        if lacking:
            having = next(name for name in shapes if slot in names[name])
            what = "model tensor" if slot is None else f"optimizer slot {slot!r}"
            raise RulesInvalid(
                f"{rule.label}: {lacking[0]} has no {what}, but {having} has, which belongs to "
                "the same tensors; leave that slot out of the conversion"
            )
        keys = {name: names[name][slot] for name in shapes}
        specs = {name: tensors[key] for name, key in keys.items()}
        dtypes = {spec.dtype for spec in specs.values()}
        if len(dtypes) > 1:
            raise RulesInvalid(
                f"{rule.label}: {', '.join(list(keys.values())[:_SHOWN])} have different data "
                f"types: {', '.join(sorted(dtypes))}; convert them to one first"
            )
        (dtype,) = dtypes
        if all(specs[name].shape == shapes[name] for name in shapes):
            for target, views in geometry.views.items():
                planned[_key(target, slot)] = PlannedTensor(
                    TensorSpec(dtype, geometry.shapes[target]),
                    tuple(_renamed(view, keys) for view in views),
                )
            left_out += [
                LeftOut(keys[name], box, f"padding that {rule.place} cuts off")
                for name, box in geometry.left_out
            ]
        elif rule.only_renames or {math.prod(spec.shape) for spec in specs.values()} == {1}:
            first = next(iter(shapes))
            for target in geometry.shapes:
                planned[_key(target, slot)] = unchanged(keys[first], specs[first])
            if len(keys) > 1:
                equal.append(tuple(keys.values()))
        else:
            left_out += [
                LeftOut(
                    key,
                    Box.whole(specs[name].shape),
                    f"its shape {list(specs[name].shape)} is not that of its parameter, "
                    f"{list(shapes[name])}, which {rule.place} rearranges",
                )
                for name, key in keys.items()
            ]
    return Plan(tensors=planned, left_out=tuple(left_out), equal=tuple(equal))


def _key(name: str, slot: str | None) -> str:
    return f"{_MODEL}{name}" if slot is None else f"{_OPTIMIZER}{name}/{slot}"


def _renamed(view: View, keys: Mapping[str, str]) -> View:
    return View(
        source=None if view.source is None else keys[view.source],
        target_offset=view.target_offset,
        source_offset=view.source_offset,
        axes=view.axes,
    )


def _first_source(tensor: PlannedTensor) -> str:
    return next((view.source for view in tensor.views if view.source is not None), "nothing")
