"""What an optimizer has besides tensors: hyperparameters and plain numbers, keyed by parameters' names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.documents import GROUPS, SCALARS


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return each parameter's name by identity; one that is used in several places has its first name."""
    return {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}


def name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    """Return a parameter's name.

    Raises:
        LayoutMismatch: the model has no such parameter.
    """
    try:
        return names[id(parameter)]
    except KeyError:
        raise LayoutMismatch(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not; make "
            "the optimizer after the model is sharded, and give both of one training state"
        ) from None


def options_of(group: Mapping[str, Any]) -> dict[str, Json]:
    """Return the hyperparameters of an optimizer's group."""
    return {
        option: as_json_value(option, value)
        for option, value in group.items()
        if option != "params"
    }


def as_json_value(name: str, value: Any) -> Json:
    """Return a value as a document has it, the caller's own; a tensor of one element, such as a learning rate, as a number."""
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
    """Give optimizers back their hyperparameters, by the names of their parameters, and their scalar slots.

    Raises:
        LayoutMismatch: a group joins parameters that were in groups with different options.
    """
    names = parameter_names(model)
    stored = {
        name: group["options"]
        for group in documents.get(GROUPS, [])
        for name in group["parameters"]
    }
    scalars: dict[str, dict[str, Json]] = {}
    for key, value in documents.get(SCALARS, {}).items():
        name, _, slot = key.rpartition("/")
        scalars.setdefault(name, {})[slot] = value
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known = [
                name
                for parameter in group["params"]
                if (name := name_of(parameter, names)) in stored
            ]
            for name in known:
                if stored[name] != stored[known[0]]:
                    raise LayoutMismatch(
                        f"{known[0]} and {name} are in one optimizer group and were saved in two with "
                        "different options; group the parameters as they were when saved"
                    )
            for option, value in (stored[known[0]] if known else {}).items():
                if isinstance(group.get(option), torch.Tensor):
                    group[option].fill_(value)
                else:
                    group[option] = tuple(value) if isinstance(group.get(option), tuple) else value
            for parameter in group["params"]:
                for slot, value in scalars.get(name_of(parameter, names), {}).items():
                    optimizer.state[parameter][slot] = value


def is_json(value: Any) -> bool:
    """Return whether a value can stand in a document."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
