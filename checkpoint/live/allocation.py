"""Creates the optimizer slots that a source has and a live optimizer has not made yet.

A new optimizer makes its slots in its first step. A load fills slots, so they have to exist before
it; if the load fails, created slots are removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.described import Tie, master_of, stored_parameter
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.format.layout.documents import MASTERS, SCALARS, TIED
from keepstep.checkpoint.format.layout.encoded_values import noted_slots, slots_within
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX
from keepstep.checkpoint.format.layout.source import Source, TensorSpec
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.optimizer_rest import (
    REST,
    PendingRest,
    Rest,
    check_fits,
    parameters_of,
)
from keepstep.checkpoint.live.optimizer_state import local_groups, slots_of
from keepstep.checkpoint.live.tensor_values import new_tensor
from keepstep.checkpoint.live.tensors import (
    torch_dtype,
)

_SMALL_SLOT = 2**16
"""Elements that a slot may have with any shape of its parameter, such as tables for
quantization."""


def allocate(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    source: Source,
    *,
    descriptions: Descriptions = NOT_DESCRIBED,
) -> Callable[[], None]:
    """Create the optimizer slots that the source has and a new optimizer lacks.

    A slot of the parameter's shape in the source is sharded like the parameter, and has its shape
    here; any other slot is complete on every rank. A master begins as its parameter's values, and
    is not made where the parameter has its data type. `step` is where torch's own optimizers keep
    it: on the CPU, unless the group is fused or capturable. Units of FSDP free their gathered
        parameters, which are about to change.

    Args:
        model: names the parameters.
        optimizers: the optimizers to complete.
        source: the state to read.
        descriptions: the parameters with fused parts, and the slots that may be masters.

    Returns:
        An undo for a load that fails. It restores the slots that every parameter had before, also
        if `restore_options` has added others since: with part of a state the next step would fail
        or be wrong. It does not restore the tensors' values.

    Raises:
        LayoutMismatch: torch has no such data type, the model no such parameter, or a slot is far
            too large for its parameter. After this or
            any other error, such as lack of memory, the optimizers are unchanged.
    """
    undo = _make_undo(optimizers)
    try:
        _allocate(ModelParameters(model, descriptions), optimizers, source, descriptions)
    except BaseException:
        undo()
        raise
    return undo


def _check_slot_size(
    name: str, slot: str, spec: TensorSpec, shape: tuple[int, ...], total: int
) -> None:
    """Refuse a slot that no optimizer has: each rank would allocate all of it.

    The largest known are preconditioners, matrices over the elements of a dimension (Shampoo), and
    vectors over all parameters (L-BFGS). `total` is the number of the optimizer's elements.
    """
    most = max(_SMALL_SLOT, math.prod(shape) ** 2, total)
    if math.prod(spec.shape) > most:
        raise LayoutMismatch(
            f"optim/{name}/{slot}: the source holds {spec.dtype} {spec.shape}, too much for a "
            f"parameter of shape {shape}; it is damaged, or of another model"
        )


def _make_undo(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return a function that restores the optimizers' present state, except for values."""
    before: list[tuple[Optimizer, dict[Any, Any]]] = [
        (
            optimizer,
            {
                key: dict(value) if isinstance(key, torch.Tensor) else value
                for key, value in slots_of(optimizer).items()
            },
        )
        for optimizer in optimizers
    ]

    def undo() -> None:
        for optimizer, kept in before:
            state = slots_of(optimizer)
            for key in [key for key in state if key not in kept]:
                del state[key]
            for key, value in kept.items():
                if isinstance(key, torch.Tensor):
                    # In place: others, such as a `LiveStateReader`, hold these dictionaries.
                    slots = state.setdefault(key, {})
                    slots.clear()
                    slots.update(value)
                else:
                    state[key] = value

    return undo


def _allocate(
    parameters: ModelParameters,
    optimizers: Sequence[Optimizer],
    source: Source,
    descriptions: Descriptions,
) -> None:
    own_names = {
        name
        for optimizer in optimizers
        for group in local_groups(optimizer)
        for parameter in group["params"]
        for name in parameters.shapes(parameter)
    }
    slots = dict(source.slots(own_names))
    ties = _ties(own_names, slots, source)
    slots.update(source.slots({_name_of(tie) for tie in ties.values()}) if ties else {})
    values = _values_by_name(source)
    for optimizer in optimizers:
        state, groups = slots_of(optimizer), local_groups(optimizer)
        total = sum(p.numel() for group in groups for p in group["params"])
        for group in groups:
            for parameter in group["params"]:
                on_device = group.get("fused") or group.get("capturable")
                for name, shape in parameters.shapes(parameter).items():
                    tie = ties.get(name)
                    stored_name = name if tie is None else _name_of(tie)
                    stored_values = values.get(stored_name, {})
                    noted = noted_slots(stored_values)
                    for slot in stored_values if parameter in state else ():
                        # Objects that are no tensors in the source are not filled.
                        state[parameter].pop(slot, None)
                    for slot, stored_spec in slots.get(stored_name, {}).items():
                        if isinstance(state.get(parameter, {}).get(slot), torch.Tensor):
                            continue
                        if slot.startswith(f"{REST}.") and REST in stored_values:
                            continue
                        spec = stored_spec
                        if tie is not None and tie.is_transposed:
                            spec = replace(spec, shape=spec.shape[::-1])
                        dtype = torch_dtype(spec.dtype)
                        is_master = slot in descriptions.master_slots and _is_master(
                            stored_name, slot, source
                        )
                        if is_master and dtype == parameter.dtype:
                            continue
                        has_shape = _has_parameter_shape(stored_name, shape, spec, source)
                        if slot != "step" and has_shape and "strides" not in noted.get(slot, {}):
                            new = parameters.new_master if is_master else parameters.new_slot
                            created = new(parameter, dtype)
                        else:
                            _check_slot_size(name, slot, spec, shape, total)
                            on_cpu = slot == "step" and not on_device
                            created = new_tensor(
                                spec.shape,
                                dtype,
                                torch.device("cpu") if on_cpu else parameter.device,
                                noted.get(slot, {}),
                            )
                        state.setdefault(parameter, {})[slot] = created
        _prepare_rest(optimizer, parameters, values, slots, total)


def _values_by_name(source: Source) -> dict[str, dict[str, Json]]:
    """Return the slots of a source that are no tensors, by parameter and slot."""
    values: dict[str, dict[str, Json]] = {}
    for key, value in source.documents.get(SCALARS, {}).items():
        name, _, slot = key.rpartition("/")
        values.setdefault(name, {})[slot] = value
    return values


def _prepare_rest(
    optimizer: Optimizer,
    parameters: ModelParameters,
    values: Mapping[str, Mapping[str, Json]],
    slots: Mapping[str, Mapping[str, TensorSpec]],
    total: int,
) -> None:
    """Make the tensors of a source's remaining entries of an optimizer's `state_dict`."""
    members = parameters_of(optimizer)
    names = [name for parameter in members for name in parameters.names(parameter)]
    owner = next((name for name in names if REST in values.get(name, {})), None)
    if owner is None:
        return
    document = values[owner][REST]
    check_fits(optimizer, parameters, document)
    tensors: dict[str, torch.Tensor] = {}
    for noted in slots_within(document["content"]):
        slot = noted["name"]
        spec = slots.get(owner, {}).get(slot)
        if spec is None:
            raise LayoutMismatch(f"optim/{owner}/{slot}: missing in the source")
        dtype = torch_dtype(spec.dtype)
        if "like" in noted:
            tensors[slot] = parameters.new_slot(parameters.named(noted["like"]), dtype)
        else:
            _check_slot_size(owner, slot, spec, tuple(members[0].shape), total)
            tensors[slot] = new_tensor(spec.shape, dtype, members[0].device, noted)
    state = slots_of(optimizer)
    state.setdefault(members[0], {})[REST] = PendingRest(
        Rest(document, tensors, document["is_whole"])
    )


def _ties(
    own_names: Collection[str], slots: Mapping[str, Mapping[str, TensorSpec]], source: Source
) -> dict[str, Tie]:
    """Return the parameters whose state stands for that of tied ones in a source."""
    lacking = [name for name in own_names if name not in slots]
    document = source.documents.get(TIED) if lacking else None
    ties = ((name, stored_parameter(document, name, own_names)) for name in lacking)
    return {name: tie for name, tie in ties if tie is not None}


def _name_of(tie: Tie) -> str:
    return tie.key.removeprefix(MODEL_PREFIX)


def _has_parameter_shape(
    name: str, shape: tuple[int, ...], spec: TensorSpec, source: Source
) -> bool:
    """Return whether a slot has its parameter's shape, with the source's or the state's padding."""
    if spec.shape == shape:
        return True
    if len(spec.shape) != len(shape):
        return False
    stored = source.tensors.get(f"{MODEL_PREFIX}{name}")
    return stored is not None and stored.shape == spec.shape


def _is_master(name: str, slot: str, source: Source) -> bool:
    """Return whether a slot is the parameter in a wider data type, according to the source."""
    key = f"{MODEL_PREFIX}{name}"
    master = master_of(source.documents.get(MASTERS), key)
    return master is not None and master.key == f"optim/{name}/{slot}"
