"""Captures and restores an optimizer's state other than the slots of parameters and the groups.

It has entries of `state` that are keyed by no parameter, numbers of a subclass's own, and the whole
state of an optimizer around another one. It is stored as the slot `state_dict` of the optimizer's
first parameter, with the names of all of them in their order, for it may count them. The
optimizer's own `load_state_dict` gets back the content of its `state_dict`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_state import (
    is_divided,
    parameter_slots,
    slots_of,
)
from keepstep.checkpoint.live.tensor_values import SlotEncoder, slot_decoder

REST = "state_dict"
_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True)
class Rest:
    """The stored part of an optimizer's `state_dict` other than slots and groups.

    Attributes:
        document: the entries that are no tensors, as JSON.
        tensors: the tensors in it, by the names of the slots of the first parameter.
        is_whole: whether it is all of the `state_dict`, slots included.
    """

    document: Json
    tensors: Mapping[str, torch.Tensor]
    is_whole: bool


@dataclass(slots=True)
class PendingRest:
    """A rest whose tensors are to be filled; it is among the slots of the first parameter.

    There it is removed with them if the load fails.
    """

    rest: Rest


def tells_its_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes its `state_dict` itself, or by hooks."""
    return not is_divided(optimizer) and (
        type(optimizer).state_dict is not Optimizer.state_dict
        or "state_dict" in vars(optimizer)
        or _has_hooks(optimizer, "state_dict_pre_hooks", "state_dict_post_hooks")
    )


def takes_its_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer does more to load its state than torch's own, or has hooks."""
    return not is_divided(optimizer) and (
        type(optimizer).load_state_dict is not Optimizer.load_state_dict
        or "load_state_dict" in vars(optimizer)
        or _has_hooks(optimizer, "load_state_dict_pre_hooks", "load_state_dict_post_hooks")
    )


def _has_hooks(optimizer: Optimizer, *kinds: str) -> bool:
    return any(getattr(optimizer, f"_optimizer_{kind}", None) for kind in kinds)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order of its groups.

    Raises:
        LayoutMismatch: the optimizer has no groups.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        raise LayoutMismatch(
            f"{type(optimizer).__name__} has no param_groups, so that its parameters are not "
            "known; pass the optimizer that it is made of, or leave it out"
        )
    return list(chain.from_iterable(group["params"] for group in groups))


def rest_of(optimizer: Optimizer, parameters: ModelParameters) -> Rest | None:
    """Return an optimizer's `state_dict` entries other than slots and groups; None without any.

    Raises:
        LayoutMismatch: part of it cannot be stored; the message names it.
    """
    members = parameters_of(optimizer)
    if tells_its_state(optimizer):
        state_dict: object = optimizer.state_dict()
        if not isinstance(state_dict, Mapping):
            raise LayoutMismatch(
                f"the state_dict of {type(optimizer).__name__} is of type "
                f"{type(state_dict).__name__}, and no mapping; leave the optimizer out"
            )
        is_whole = not isinstance(state_dict.get(_STATE), Mapping) or not isinstance(
            state_dict.get(_GROUPS), list
        )
        tree = dict(state_dict) if is_whole else _unexplained(state_dict, optimizer, members)
    else:
        is_whole = False
        entries = {
            key: value
            for key, value in slots_of(optimizer).items()
            if not isinstance(key, torch.Tensor)
        }
        tree = {_STATE: entries} if entries else {}
    if not tree:
        return None
    if not members:
        raise LayoutMismatch(
            f"{type(optimizer).__name__} has state but no parameter to name it after; leave the "
            "optimizer out"
        )
    encoder = SlotEncoder(
        f"{first_name(optimizer, parameters)}/{REST}", parameters, members[0], optimizer
    )
    document = {
        "parameters": _names(optimizer, parameters),
        "is_whole": is_whole,
        "content": encoder.encode(tree),
    }
    return Rest(document, encoder.tensors, is_whole)


def _unexplained(
    state_dict: Mapping[str, Any], optimizer: Optimizer, members: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return the entries of a `state_dict` that are not in the stored slots and groups."""
    slots = dict(parameter_slots(optimizer))
    rest = {key: value for key, value in state_dict.items() if key not in (_STATE, _GROUPS)}
    state = {
        key: value
        for key, value in state_dict[_STATE].items()
        if not (
            isinstance(key, int)
            and key < len(members)
            and _has_same(value, slots.get(members[key], {}))
        )
    }
    groups = [
        {option: value for option, value in group.items() if option != "params"}
        for group in optimizer.param_groups
    ]
    own_groups = [
        {option: value for option, value in group.items() if option != "params"}
        for group in state_dict[_GROUPS]
    ]
    if state:
        rest[_STATE] = state
    if len(groups) != len(own_groups) or not all(map(_has_same, own_groups, groups)):
        rest[_GROUPS] = state_dict[_GROUPS]
    return rest


def _has_same(saved: Any, live: Mapping[str, Any]) -> bool:
    """Return whether a mapping has the same objects under the same names as another."""
    return (
        isinstance(saved, Mapping)
        and saved.keys() == live.keys()
        and all(map(operator.is_, saved.values(), (live[key] for key in saved)))
    )


def first_name(optimizer: Optimizer, parameters: ModelParameters) -> str:
    """Return the name of an optimizer's first parameter. Raises as `ModelParameters.names` does."""
    return parameters.names(parameters_of(optimizer)[0])[0]


def _names(optimizer: Optimizer, parameters: ModelParameters) -> list[str]:
    return [name for parameter in parameters_of(optimizer) for name in parameters.names(parameter)]


def pending_of(optimizer: Optimizer) -> PendingRest | None:
    """Return the rest that an optimizer is to get once its tensors are filled, if any."""
    members = parameters_of(optimizer)
    if not members:
        return None
    pending = dict(parameter_slots(optimizer)).get(members[0], {}).get(REST)
    return pending if isinstance(pending, PendingRest) else None


def check_fits(optimizer: Optimizer, parameters: ModelParameters, document: Json) -> None:
    """Check that a stored rest is of an optimizer that takes it, with the same parameters in order.

    Raises:
        LayoutMismatch: it is not; the message names the first that differs.
    """
    if not takes_its_state(optimizer):
        content = document["content"]
        names = set(content) - ({_STATE} if not document["is_whole"] else set())
        if names:
            raise LayoutMismatch(
                f"the source's optimizer has {min(names)!r}, which {type(optimizer).__name__} does "
                "not take; pass an optimizer of the class that was saved"
            )
    own, stored = _names(optimizer, parameters), document["parameters"]
    if own == stored:
        return
    pairs = zip(own, stored, strict=False)
    differing = next((pair for pair in pairs if pair[0] != pair[1]), None)
    how = (
        f"here {differing[0]} is where {differing[1]} was"
        if differing is not None
        else f"here it has {len(own)} parameters, and had {len(stored)}"
    )
    raise LayoutMismatch(
        f"the state_dict of {type(optimizer).__name__} has more than slots of parameters, and was "
        f"saved with other parameters or in another order: {how}; make it in the same way as before"
    )


def load_rest(optimizer: Optimizer, parameters: ModelParameters) -> None:
    """Load the rest into an optimizer with restored slots and groups, by `load_state_dict`.

    Slots keep the data types that they have, to which torch's own would convert them. Without a
    rest and with torch's own `load_state_dict`, only `__setstate__` is called, as torch does: it
    brings the state of older releases up to date.

    Raises:
        LayoutMismatch: the optimizer did not take it.
    """
    pending = pending_of(optimizer)
    members = parameters_of(optimizer)
    slots = slots_of(optimizer)
    tree: dict[Any, Any] = {}
    is_whole = False
    if pending is not None:
        del slots[members[0]][REST]
        if not slots[members[0]]:
            del slots[members[0]]
        content = pending.rest.document["content"]
        decoder = slot_decoder(pending.rest.tensors, parameters.named, optimizer)
        tree, is_whole = decoder.decode(content), pending.rest.is_whole
    elif not takes_its_state(optimizer):
        _bring_up_to_date(optimizer)
        return
    elif tells_its_state(optimizer) and not _is_standard(optimizer):
        # The source has none of it, as when an optimizer is loaded from a module's checkpoint.
        return
    before = {parameter: dict(kept) for parameter, kept in parameter_slots(optimizer)}
    groups = [dict(group) for group in optimizer.param_groups]
    if not is_whole:
        numbers = {id(parameter): number for number, parameter in enumerate(members)}
        state = {numbers[id(p)]: kept for p, kept in before.items() if id(p) in numbers}
        tree = {
            _GROUPS: [
                {**group, "params": [numbers[id(p)] for p in group["params"]]} for group in groups
            ],
            **tree,
            _STATE: {**state, **tree.get(_STATE, {})},
        }
    try:
        optimizer.load_state_dict(tree)
    except Exception as error:
        raise LayoutMismatch(
            f"load_state_dict of {type(optimizer).__name__} failed: {type(error).__name__}: {error}"
        ) from error
    if is_whole:
        return
    after = slots_of(optimizer)
    for parameter, kept in before.items():
        for slot, value in kept.items():
            if isinstance(value, torch.Tensor):
                after[parameter][slot] = _exact(value, after[parameter].get(slot))
            elif isinstance(value, Collection) and not isinstance(value, str):
                after[parameter][slot] = value
    for group, former in zip(optimizer.param_groups, groups, strict=True):
        # Compiled and captured steps read these tensors.
        group.update(
            (option, value) for option, value in former.items() if isinstance(value, torch.Tensor)
        )


def _is_standard(optimizer: Optimizer) -> bool:
    state_dict: object = optimizer.state_dict()
    return isinstance(state_dict, Mapping) and {_STATE, _GROUPS} <= state_dict.keys()


def _exact(stored: torch.Tensor, loaded: object) -> torch.Tensor:
    """Return a slot as it was stored: in the tensor that was loaded, if that can hold it."""
    if (
        type(loaded) is not type(stored)
        or not isinstance(loaded, torch.Tensor)
        or (loaded.dtype, loaded.shape, loaded.device)
        != (stored.dtype, stored.shape, stored.device)
    ):
        return stored
    if loaded is not stored:
        with torch.no_grad():
            loaded.copy_(stored)
    return loaded


def _bring_up_to_date(optimizer: Optimizer) -> None:
    inner: Any = optimizer if not is_divided(optimizer) else None
    if inner is not None and _GROUPS in vars(inner):
        inner.__setstate__({_STATE: inner.state, _GROUPS: inner.param_groups})
