"""Optimizer state that is not tensors: hyperparameters and numbers, keyed by parameter names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.described import stored_parameter
from keepstep.checkpoint.layout.documents import GROUPS, SCALARS, TIED
from keepstep.checkpoint.layout.names import MODEL_PREFIX
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_state import local_groups, slots_of


def options_of(group: Mapping[str, Any]) -> dict[str, Json]:
    """Return the hyperparameters of an optimizer's group."""
    return {
        option: as_json_value(option, value)
        for option, value in group.items()
        if option != "params"
    }


def as_json_value(name: str, value: Any) -> Json:
    """Return a value as JSON, copied.

    A tensor of one element, such as a learning rate, becomes a number.

    Args:
        name: the value's name, for the error message.
        value: the value.

    Raises:
        LayoutMismatch: the value is neither JSON nor a tensor of one element.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if not is_json(value):
        raise LayoutMismatch(
            f"optimizer value {name!r} of type {type(value).__name__} cannot be stored"
        )
    return copy.deepcopy(value) if isinstance(value, list | Mapping) else value


def restore_options(
    model: nn.Module, optimizers: Sequence[Optimizer], documents: Mapping[str, Json]
) -> None:
    """Restore the hyperparameters and the scalar slots of optimizers, by parameter names.

    Args:
        model: names the parameters.
        optimizers: the optimizers to fill.
        documents: the documents of the source.

    Raises:
        LayoutMismatch: a group has parameters that were saved in groups with different options.
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
            for option, value in (stored[known[0]] if known else {}).items():
                if isinstance(group.get(option), torch.Tensor):
                    group[option].fill_(value)
                else:
                    group[option] = tuple(value) if isinstance(group.get(option), tuple) else value
        state = slots_of(optimizer)
        for group in local_groups(optimizer):
            for parameter in group["params"]:
                for name in parameters.shapes(parameter):
                    for slot, value in scalars.get(name, {}).items():
                        state[parameter][slot] = value


def is_json(value: Any) -> bool:
    """Return whether a value can be stored in a document."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
