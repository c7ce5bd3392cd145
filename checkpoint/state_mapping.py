"""Reads and fills the mapping that users pass to `save` and `load`: modules, tensors, JSON values.

No communication.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.documents import PARTS
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.flat_fragment import FlatFragment
from keepstep.checkpoint.live.optimizer_options import is_json
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, check_disjoint

VALUES = "values"
"""The document that holds the state's JSON values, by name."""

StateMapping = Mapping[str, object]


def modules_of(state: StateMapping) -> list[tuple[nn.Module, list[Optimizer]]]:
    """Return the state's module with its optimizers, or nothing if it has no module.

    Raises:
        LayoutMismatch: the state has several modules, or an optimizer without a module.
    """
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    if len(modules) > 1:
        raise LayoutMismatch(
            "the state has several modules; put them into one nn.ModuleDict, or save them under "
            "several URLs"
        )
    if optimizers and not modules:
        raise LayoutMismatch(
            "the state has an optimizer but not the module that names its parameters; add it"
        )
    return [(modules[0], optimizers)] if modules else []


def capture(state: StateMapping, fused: FusedTensors) -> LiveState:
    """Return the live tensors and the documents of a state.

    Args:
        state: the state.
        fused: which of its tensors have fused parts.

    Raises:
        LayoutMismatch: part of the state cannot be stored; the message names it.
    """
    tensors: list[LiveTensor] = []
    values: dict[str, Json] = {}
    documents: dict[str, Json] = {}
    for model, optimizers in modules_of(state):
        captured = LiveStateReader(model, optimizers, fused).capture()
        tensors += captured.tensors
        documents.update(captured.documents)
    captured_count = len(tensors)
    _walk(state, "", fused, tensors, values)
    check_disjoint(tensors)
    others = (tensor.key for tensor in tensors[captured_count:])
    parts = {**documents.get(PARTS, {}), **fused.document(others)}
    if parts:
        documents[PARTS] = parts
    return LiveState(tuple(tensors), {**documents, VALUES: values})


def fill_values(state: StateMapping, values: Mapping[str, Json], prefix: str = "") -> None:
    """Put JSON values into the mutable mappings of a state that have their names."""
    for name, value in list(state.items()):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            fill_values(value, values, f"{key}/")
        elif key in values and isinstance(state, dict):
            state[name] = values[key]


def _walk(
    state: StateMapping,
    prefix: str,
    fused: FusedTensors,
    tensors: list[LiveTensor],
    values: dict[str, Json],
) -> None:
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, torch.Tensor):
            tensors += fused.describe(key, key, value)
        elif isinstance(value, FlatFragment):
            tensors += value.describe(key)
        elif isinstance(value, Mapping):
            _walk(value, f"{key}/", fused, tensors, values)
        elif is_json(value):
            values[key] = value
        elif prefix or not isinstance(value, nn.Module | Optimizer):
            raise LayoutMismatch(
                f"{key}: a {type(value).__name__} cannot be stored; pass tensors, flat fragments, "
                "JSON values and mappings of them, and the module and its optimizers at the top "
                "level"
            )
