"""Finds the modules that `torch.optim.swa_utils.AveragedModel`s inside a module average.

An `AveragedModel` does not refer to its original. It is taken to be a module of the same class,
with the same parameters, next to it in one module; among several it cannot be identified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim.swa_utils import AveragedModel

from keepstep.checkpoint.format.layout.descriptions import Average
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.live.model_parameters import name_cleaner


def averages_in(model: nn.Module) -> dict[str, Average]:
    """Return the parameters of a module that are averages, with those they average, all by key."""
    clean = name_cleaner(model)
    averages: dict[str, Average] = {}
    paths = {
        path: module for path, module in model.named_modules() if isinstance(module, AveragedModel)
    }
    for path, averaging in paths.items():
        averaged = _averaged_by(model, path, averaging.module, clean)
        if averaged is None:
            continue
        place, source = clean(path), clean(averaged)
        for name in _shapes(averaging.module):
            averages[_key(place, f"module.{name}")] = Average(
                of=_key(source, name), count=_key(place, "n_averaged")
            )
    return averages


def stored_averages(
    found: Mapping[str, Average], tensors: Mapping[str, TensorSpec]
) -> dict[str, Average]:
    """Return the averages whose tensors are all stored, with the shapes of the averaged ones.

    A further name of tied weights is not stored, and a copy of them may not be tied.
    """
    return {
        key: average
        for key, average in found.items()
        if key in tensors
        and average.of in tensors
        and tensors[average.of].shape == tensors[key].shape
        and average.count in tensors
    }


def _averaged_by(
    model: nn.Module, averaging: str, copy: nn.Module, clean: Callable[[str], str]
) -> str | None:
    """Return the path of the only module that a copy can be the average of; None without one.

    A module inside an `AveragedModel` does not qualify: it would give an average of averages.
    """
    shapes = _shapes(copy)
    candidates: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        if isinstance(module, AveragedModel):
            return
        # A module that contains the average has other parameters than the average.
        if type(module) is type(copy) and _shapes(module) == shapes:
            candidates.append(path)
            return
        for name, child in module.named_children():
            visit(_joined(path, name), child)

    parent, _, _ = averaging.rpartition(".")
    # A wrapper of the average alone has no other module.
    while parent and clean(parent) == clean(averaging):
        parent, _, _ = parent.rpartition(".")
    visit(parent, model.get_submodule(parent))
    return candidates[0] if len(candidates) == 1 else None


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    clean = name_cleaner(module)
    return {clean(name): tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _key(path: str, name: str) -> str:
    return f"{MODEL_PREFIX}{_joined(path, name)}"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
