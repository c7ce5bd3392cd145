"""Reads and fills the mapping that users pass to `save` and `load`: modules, tensors, JSON values.

No communication.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.completeness import MODEL, OPTIMIZER, Requested
from keepstep.checkpoint.format.layout.descriptions import (
    NOT_DESCRIBED,
    Descriptions,
    describing_documents,
)
from keepstep.checkpoint.format.layout.documents import CONFIG, VALUES
from keepstep.checkpoint.format.layout.parameter_order import LiveOrders
from keepstep.checkpoint.live.capture import LiveStateReader
from keepstep.checkpoint.live.flat_fragment import FlatFragment
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_options import obstacle_to_json
from keepstep.checkpoint.live.optimizer_state import local_groups
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.provenance import checked_config
from keepstep.checkpoint.live.storable import check_text
from keepstep.checkpoint.live.tensors import (
    LiveState,
    LiveTensor,
    check_disjoint,
    is_one_of_several,
    specs_of,
)

StateMapping = Mapping[str, object]


def modules_of(state: StateMapping) -> list[tuple[nn.Module, list[Optimizer]]]:
    """Return the state's module with its optimizers; None if it has no module.

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


def optimizer_orders(state: StateMapping) -> LiveOrders:
    """Return the order of parameters in the state's optimizers.

    Those that hold flat pieces of several parameters, as with FSDP1, are not among them.
    """
    orders: dict[str, list[list[str]]] = {}
    for model, _ in modules_of(state):
        parameters = ModelParameters(model)
        for name, optimizer in state.items():
            if not isinstance(optimizer, Optimizer):
                continue
            groups = [
                [parameters.names(parameter) for parameter in group["params"]]
                for group in optimizer.param_groups
            ]
            if all(len(names) == 1 for group in groups for names in group):
                orders[name] = [[name for (name,) in group] for group in groups]
    return LiveOrders(orders)


def capture(
    state: StateMapping, descriptions: Descriptions = NOT_DESCRIBED, config: Json = None
) -> LiveState:
    """Return the live tensors and the documents of a state.

    Args:
        state: the state.
        descriptions: of its tensors.
        config: the model's configuration, as JSON; None for none.

    Raises:
        LayoutMismatch: part of the state cannot be stored; the message names it.
    """
    modules = modules_of(state)
    tensors: list[LiveTensor] = []
    values: dict[str, Json] = {}
    _walk(state, "", FusedTensors(descriptions), tensors, values)
    for tensor in tensors:
        _check_free(tensor.key, values)
    documents: dict[str, Json] = {}
    computed = None
    for model, optimizers in modules:
        captured = LiveStateReader(model, optimizers, descriptions).capture(other_tensors=tensors)
        tensors = [*captured.tensors, *tensors]
        documents.update(captured.documents)
        computed = captured.computed
    check_disjoint(tensors)
    if not modules:
        documents.update(
            describing_documents(descriptions, specs_of(tensors), is_whole=not is_one_of_several())
        )
    if config is not None:
        documents[CONFIG] = checked_config(config)
    return LiveState(tuple(tensors), {**documents, VALUES: values}, computed)


def requested_by(state: StateMapping) -> Requested:
    """Return the names that a state asks a checkpoint for: everything under its top-level names.

    Raises:
        LayoutMismatch: the state has several modules, or an optimizer without a module, or with
            parameters that the module does not have.
    """
    names = {
        MODEL if isinstance(value, nn.Module) else OPTIMIZER if _is_optimizer(value) else name
        for name, value in state.items()
    }
    # Another tool's file may have further optimizer state, as values under its name there.
    names.update(name for name, value in state.items() if _is_optimizer(value))
    parameters: set[str] | None = None
    for model, optimizers in modules_of(state):
        if optimizers:
            named = ModelParameters(model)
            parameters = {
                name
                for optimizer in optimizers
                for group in local_groups(optimizer)
                for parameter in group["params"]
                for name in named.shapes(parameter)
            }
    return Requested(
        names=frozenset(names),
        parameters=None if parameters is None else frozenset(parameters),
    )


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer)


def fill_values(state: StateMapping, values: Mapping[str, Json], prefix: str = "") -> None:
    """Put JSON values into the mutable mappings of a state that have their names.

    Raises:
        LayoutMismatch: as `check_mutable` raises.
    """
    for name, value in list(state.items()):
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            fill_values(value, values, f"{key}/")
        elif key in values and isinstance(state, MutableMapping):
            state[name] = values[key]


def check_mutable(state: StateMapping, values: Mapping[str, Json], prefix: str = "") -> None:
    """Check that the mappings of a state can get their values, or have them already.

    Raises:
        LayoutMismatch: a mapping cannot be changed, and has another value; the message names it.
    """
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            check_mutable(value, values, f"{key}/")
        elif key in values and not isinstance(state, MutableMapping) and value != values[key]:
            raise LayoutMismatch(
                f"{key}: the source has another value, and a {type(state).__name__} cannot be "
                "changed; pass a dict"
            )


def _check_free(key: str, values: Mapping[str, Json]) -> None:
    """Refuse a key that is a value's already: `{"a": {"b": 1}, "a/b": 2}` has `a/b` twice."""
    if key in values:
        raise LayoutMismatch(f"{key} is in the state twice; rename one of the two")


def _walk(
    state: StateMapping,
    prefix: str,
    fused: FusedTensors,
    tensors: list[LiveTensor],
    values: dict[str, Json],
) -> None:
    for name, value in state.items():
        key = f"{prefix}{name}"
        check_text(key)
        if isinstance(value, torch.Tensor):
            tensors += fused.describe(key, value)
        elif isinstance(value, FlatFragment):
            tensors += value.describe(key)
        elif isinstance(value, Mapping):
            _walk(value, f"{key}/", fused, tensors, values)
        elif prefix or not isinstance(value, nn.Module | Optimizer):
            obstacle = obstacle_to_json(value)
            if obstacle is not None:
                raise LayoutMismatch(
                    f"{key}: {obstacle} cannot be stored; pass tensors, flat fragments, JSON "
                    "values and mappings of them, and the module and its optimizers at the top "
                    "level"
                )
            _check_free(key, values)
            values[key] = value
