"""The `state_dict` of an optimizer of torch: state and groups, by numbers or by names.

Numbers count through the groups in the order in which the optimizer was given its parameters, which
is not the order of the module. A wrong guess would give parameters each other's moments, so numbers
become names only if something says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.checkpoint.foreign.contents import Contents, mapping_of, tensor_of
from keepstep.checkpoint.foreign.files import damaged
from keepstep.checkpoint.layout.source import TensorSpec

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
    parameter_names: Sequence[str] | None = None,
) -> None:
    """Add an optimizer's state by the names of its parameters, or leave it out.

    The model's tensors have been added before.

    Args:
        contents: where to add it.
        state: what the optimizer's `state_dict` returned.
        where: its name in the checkpoint, for what is left out.
        location: where it is, for error messages.
        parameter_names: the names in the order of the optimizer's groups, if the caller knows them.

    Raises:
        CheckpointDamaged: it contradicts itself, or the names given.
    """
    groups = [mapping_of(group) for group in state["param_groups"]]
    numbers = [_parameters(group, location) for group in groups]
    names = _names(contents, state["state"], groups, numbers, location, parameter_names)
    if names is None:
        contents.leave_out(
            where,
            "its parameters are numbered, and nothing in the checkpoint says which is which; pass "
            "their names in the order of the optimizer's groups",
        )
        return
    if len(set(names.values())) != len(names):
        raise damaged(location, f"two parameters of {where} have one name")
    for number, slots in state["state"].items():
        if number not in names or not isinstance(slots, dict):
            contents.leave_out(f"{where}.state.{number}", "it is in none of the optimizer's groups")
            continue
        for slot, value in slots.items():
            contents.add_slot(names[number], str(slot), value)
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
    if len(groups) == 1 and contents.is_in_module_order:
        return _names_in_order(contents, state, members)
    return None


def _names_in_order(
    contents: Contents, state: Mapping[Any, Any], members: Sequence[int | str]
) -> dict[int | str, str] | None:
    """Return the model's names for one group of all parameters, if all shapes agree.

    `optimizer = AdamW(model.parameters())` has them in the order of the module, as its `state_dict`
    has, if that has no buffers in between.
    """
    parameters: list[tuple[str, TensorSpec]] = [
        (key.removeprefix("model/"), tensor.spec)
        for key, tensor in contents.tensors.items()
        if key.startswith("model/")
    ]
    if len(parameters) != len(members):
        return None
    for member, (_, spec) in zip(members, parameters, strict=True):
        slots = state.get(member, {})
        for value in slots.values() if isinstance(slots, dict) else ():
            tensor = tensor_of(value, f"{member}")
            if tensor is not None and tensor.spec.shape not in ((), (1,), spec.shape):
                return None
    return {member: name for member, (name, _) in zip(members, parameters, strict=True)}
