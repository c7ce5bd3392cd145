"""Captures and restores optimizer state other than tensors: hyperparameters and numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import stored_parameter
from keepstep.checkpoint.format.layout.documents import GROUPS, SCALARS, TIED
from keepstep.checkpoint.format.layout.encoded_values import Decoder, slots_within
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, is_text
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_rest import REST, load_rest
from keepstep.checkpoint.live.optimizer_state import local_groups, slots_of
from keepstep.checkpoint.live.tensor_values import encode_option, option_decoder, slot_decoder


def options_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Json]:
    """Return the hyperparameters of an optimizer's group, as JSON.

    Tuples that a new optimizer has as well, such as pairs of coefficients, are plain lists.

    Raises:
        LayoutMismatch: one of them cannot be stored; the message names it.
    """
    defaults = getattr(optimizer, "defaults", {})
    parameter = next(iter(group["params"]), None)
    return {
        option: encode_option(
            option,
            list(value)
            if isinstance(value, tuple) and isinstance(defaults.get(option), tuple)
            else value,
            parameter,
        )
        for option, value in group.items()
        if option != "params"
    }


def restore_options(
    model: nn.Module, optimizers: Sequence[Optimizer], documents: Mapping[str, Json]
) -> None:
    """Restore optimizers' state other than tensors of parameters, by parameter names.

    These are hyperparameters, slots that are no tensors, and the rest of their `state_dict`, which
    `allocate` has prepared.

    Args:
        model: names the parameters.
        optimizers: the optimizers to fill.
        documents: the documents of the source.

    Raises:
        LayoutMismatch: a group has parameters that were saved in groups with different options, or
            an optimizer does not take its former state.
    """
    parameters = ModelParameters(model)
    stored = {
        name: group["options"]
        for group in documents.get(GROUPS, [])
        for name in group["parameters"]
    }
    own_names = {
        name
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name in parameters.names(parameter)
    }
    tied = {
        name: tie.key.removeprefix(MODEL_PREFIX)
        for name in own_names
        if name not in stored and (tie := stored_parameter(documents.get(TIED), name, own_names))
    }
    stored.update({name: stored[first] for name, first in tied.items() if first in stored})
    scalars: dict[str, dict[str, Json]] = {}
    for key, value in documents.get(SCALARS, {}).items():
        name, _, slot = key.rpartition("/")
        scalars.setdefault(name, {})[slot] = value
    for name, first in tied.items():
        scalars.setdefault(name, scalars.get(first, {}))
    is_known: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known = [
                name
                for parameter in group["params"]
                for name in parameters.names(parameter)
                if name in stored
            ]
            for name in known:
                if stored[name] != stored[known[0]]:
                    raise LayoutMismatch(
                        f"{known[0]} and {name} are in one optimizer group but were saved in two "
                        "with different options; group the parameters as they were when saved"
                    )
            if known:
                is_known.add(id(optimizer))
                _set_options(group, stored[known[0]])
        state = slots_of(optimizer)
        for group in local_groups(optimizer):
            for parameter in group["params"]:
                for name in parameters.shapes(parameter):
                    if name in scalars:
                        slots = state.setdefault(parameter, {})
                        decoder = slot_decoder(slots, parameters.named, optimizer)
                        _set_values(slots, scalars[name], decoder)
    for optimizer in optimizers:
        if id(optimizer) in is_known:
            load_rest(optimizer, parameters)


def _set_options(group: dict[str, Any], stored: Mapping[str, Json]) -> None:
    parameter = next(iter(group["params"]), None)
    decoder = option_decoder(torch.device("cpu") if parameter is None else parameter.device)
    for option, encoded in stored.items():
        value, own = decoder.decode(encoded), group.get(option)
        if isinstance(own, torch.Tensor) and isinstance(value, int | float):
            own.fill_(value)
        elif (
            isinstance(own, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (own.dtype, own.shape, own.device) == (value.dtype, value.shape, value.device)
        ):
            # Compiled and captured steps read this tensor.
            own.copy_(value)
        else:
            group[option] = tuple(value) if isinstance(own, tuple) else value


def _set_values(slots: dict[str, Any], stored: Mapping[str, Json], decoder: Decoder) -> None:
    """Set the slots of a parameter that are no tensors, but may contain some."""
    values = {slot: decoder.decode(encoded) for slot, encoded in stored.items() if slot != REST}
    for slot, encoded in stored.items():
        if slot != REST:
            for inner in slots_within(encoded):
                slots.pop(inner["name"], None)
    slots.update(values)


def obstacle_to_json(value: Any) -> str | None:
    """Return the part of a value that cannot be stored in a document, in words; None if all can."""
    if isinstance(value, str):
        return None if is_text(value) else f"{value!a}, half of a surrogate pair,"
    if value is None or isinstance(value, bool | int | float):
        return None
    if isinstance(value, Mapping):
        other = next((key for key in value if not isinstance(key, str)), None)
        if other is not None:
            return f"a mapping with a key of type {type(other).__name__}"
        parts: Iterable[Any] = itertools.chain(value, value.values())
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return f"a value of type {type(value).__name__}"
    return next((found for part in parts if (found := obstacle_to_json(part)) is not None), None)
