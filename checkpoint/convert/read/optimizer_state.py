"""Reads the `state_dict` of an optimizer of torch: state and groups, by numbers or by names.

Numbers count through the groups in the order in which the optimizer was given its parameters, which
is not the order of the module. A wrong guess would give parameters each other's moments, so numbers
become names only if something proves which: names in the groups or from the caller, the order of
the optimizer that is to be filled, or shapes that no two parameters share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.checkpoint.convert.read.contents import Contents, mapping_of, tensor_of
from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.format.layout.completeness import OPTIMIZER
from keepstep.checkpoint.format.layout.parameter_order import Groups, LiveOrders, ParameterNames
from keepstep.checkpoint.format.layout.source import TensorSpec

_NAMES = "param_names"


def is_optimizer_state(value: object) -> bool:
    """Return whether a value is what an optimizer's `state_dict` returns."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), list)
    )


def parameter_count(state: Mapping[str, Any]) -> int:
    """Return how many parameters the groups of an optimizer's `state_dict` have."""
    groups = [mapping_of(group).get("params") for group in state["param_groups"]]
    return sum(len(members) for members in groups if isinstance(members, list))


def add_optimizer_state(
    contents: Contents,
    state: Mapping[str, Any],
    where: str,
    location: str,
    parameter_names: ParameterNames = None,
    *,
    number: int = 0,
    count: int = 1,
) -> None:
    """Add an optimizer's state by the names of its parameters, or leave it out.

    The model's tensors have been added before.

    Args:
        state: what the optimizer's `state_dict` returned.
        where: its name in the checkpoint, for what is left out.
        parameter_names: the names in the order of the optimizer's groups, if the caller knows them,
            or the optimizers that are to be filled.
        number: which of the checkpoint's optimizers it is.
        count: how many the checkpoint has.

    Raises:
        CheckpointDamaged: it contradicts itself, or the names given.
    """
    groups = [mapping_of(group) for group in state["param_groups"]]
    numbers = [_parameters(group, location) for group in groups]
    order = (
        parameter_names.order_of(where, number, count)
        if isinstance(parameter_names, LiveOrders)
        else None
    )
    given = None if isinstance(parameter_names, LiveOrders) else parameter_names
    names = _names(contents, state["state"], groups, numbers, location, given, order)
    if names is None:
        contents.leave_out(where, _why_unknown(numbers, order), key=OPTIMIZER)
        return
    if len(set(names.values())) != len(names):
        raise damaged(location, f"two parameters of {where} have one name")
    for member, slots in state["state"].items():
        if member not in names or not isinstance(slots, dict):
            contents.leave_out(
                f"{where}.state.{member}",
                "it is in none of the optimizer's groups",
                key=OPTIMIZER,
            )
            continue
        for slot, value in slots.items():
            contents.add_slot(names[member], str(slot), value)
    for group, members in zip(groups, numbers, strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", _NAMES)}
        contents.add_group([names[member] for member in members], options)
    for key in state:
        if key not in ("state", "param_groups"):
            contents.add_value(f"{where}/{key}", state[key])


def _parameters(group: Mapping[str, Any], location: str) -> list[int | str]:
    members = group.get("params")
    if not isinstance(members, list) or not all(isinstance(m, int | str) for m in members):
        raise damaged(location, "a group of its optimizer has no list of parameters")
    if not isinstance(group.get(_NAMES), list | tuple | None):
        raise damaged(location, f"{_NAMES} of a group of its optimizer are no list")
    return members


def _names(
    contents: Contents,
    state: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    numbers: Sequence[Sequence[int | str]],
    location: str,
    parameter_names: Sequence[str] | None,
    order: Groups | None,
) -> dict[int | str, str] | None:
    """Return the names of all parameters, or None if they are not known."""
    members = [member for group in numbers for member in group]
    if len(set(members)) != len(members):
        raise damaged(location, "its optimizer has one parameter twice")
    if parameter_names is not None:
        if len(parameter_names) != len(members):
            raise damaged(
                location,
                f"its optimizer has {len(members)} parameters, and {len(parameter_names)} names "
                "were passed",
            )
        return dict(zip(members, parameter_names, strict=True))
    if all(isinstance(member, str) for member in members):
        return {member: str(member) for member in members}
    noted = [name for group in groups for name in group.get(_NAMES) or ()]
    if len(noted) == len(members) and all(isinstance(name, str) for name in noted):
        return dict(zip(members, noted, strict=True))
    if order is not None:
        in_order = [name for group in order for name in group]
        if list(map(len, order)) == list(map(len, numbers)) and _fits(
            contents, state, members, in_order
        ):
            return dict(zip(members, in_order, strict=True))
        return None
    if len(groups) == 1 and contents.is_in_module_order:
        return _names_in_order(contents, state, members)
    return None


def _why_unknown(numbers: Sequence[Sequence[int | str]], order: Groups | None) -> str:
    if order is None:
        return (
            "its parameters are numbered, and nothing in the checkpoint says which is which; pass "
            "their names in the order of the optimizer's groups (keepstep ckpt convert "
            "--parameter-names), or save an optimizer of model.named_parameters()"
        )
    stored, own = (" + ".join(str(len(group)) for group in groups) for groups in (numbers, order))
    if stored != own:
        return (
            f"its parameters are numbered, and its groups have {stored} of them, and those of the "
            f"optimizer to be filled {own}; make the optimizer as it was made"
        )
    return (
        "its parameters are numbered, and in the order of the optimizer to be filled some would "
        "get state of another shape; make the optimizer as it was made"
    )


def _fits(
    contents: Contents,
    state: Mapping[Any, Any],
    members: Sequence[int | str],
    names: Sequence[str],
) -> bool:
    """Return whether no slot contradicts an order of names.

    A slot has either every parameter's shape, or never, as `step` and statistics of rows.
    """
    has_shape: dict[str, set[bool]] = {}
    for member, name in zip(members, names, strict=True):
        parameter = contents.tensors.get(f"model/{name}")
        slots = state.get(member, {})
        if parameter is None or not isinstance(slots, dict):
            continue
        for slot, value in slots.items():
            tensor = tensor_of(value, f"{member}")
            if tensor is not None and tensor.spec.shape not in ((), (1,)):
                is_same = tensor.spec.shape == parameter.spec.shape
                has_shape.setdefault(str(slot), set()).add(is_same)
    return not any(len(found) == 2 for found in has_shape.values())


def _names_in_order(
    contents: Contents, state: Mapping[Any, Any], members: Sequence[int | str]
) -> dict[int | str, str] | None:
    """Return the model's names for one group of all parameters, if shapes prove the order.

    They do if each parameter that has state has one slot of its shape, and no other parameter has
    this shape. A parameter without state may be any of the group.
    """
    parameters: list[tuple[str, TensorSpec]] = [
        (key.removeprefix("model/"), tensor.spec)
        for key, tensor in contents.tensors.items()
        if key.startswith("model/")
    ]
    if len(parameters) != len(members):
        return None
    counts = Counter(spec.shape for _, spec in parameters)
    for member, (_, spec) in zip(members, parameters, strict=True):
        slots = state.get(member, {})
        if not slots:
            continue
        tensors = [
            tensor
            for value in (slots.values() if isinstance(slots, dict) else ())
            if (tensor := tensor_of(value, f"{member}")) is not None
        ]
        shapes = {tensor.spec.shape for tensor in tensors}
        if spec.shape not in shapes or not shapes <= {(), (1,), spec.shape}:
            return None
        if counts[spec.shape] > 1:
            return None
    return {member: name for member, (name, _) in zip(members, parameters, strict=True)}
