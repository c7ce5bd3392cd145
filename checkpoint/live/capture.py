"""Captures the state of a model and its optimizers at every step, at low cost.

The first capture walks over modules and optimizers; later ones only check that the same objects are
still in place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.layout.documents import GROUPS, PARTS, SCALARS, TIED
from keepstep.checkpoint.live.flat_parameters import unmanaged_containers
from keepstep.checkpoint.live.model_parameters import NOT_FUSED, ModelParameters
from keepstep.checkpoint.live.optimizer_options import (
    as_json_value,
    options_of,
)
from keepstep.checkpoint.live.optimizer_state import slots_of
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, local_of

_LOCAL = operator.attrgetter("_local_tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScannedState:
    """The result of one walk over the state, valid until an object in it is replaced.

    Attributes:
        live: the tensors, as boxes; some have several.
        containers: the dictionary that holds each tensor: `containers[i][names[i]]` is
            `tensors[i]`.
        names: the key of each tensor in its container.
        tensors: the tensors.
        sharded: the tensors that are DTensors.
        shards: the local tensors of `sharded`.
        scalars: optimizer slots that are numbers, as (document key, slots, slot).
        sized: all dictionaries that hold tensors.
        sizes: the number of items in each of `sized`.
        empty: places without a tensor that may get one, as (dictionary, key).
        groups: optimizer groups, with the names of their parameters.
        is_derived: a state hook makes new tensors at every call, so the walk must be repeated.
    """

    live: tuple[LiveTensor, ...]
    containers: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    sharded: tuple[torch.Tensor, ...]
    shards: tuple[torch.Tensor, ...]
    scalars: tuple[tuple[str, Mapping[str, Any], str], ...]
    sized: tuple[Mapping[Any, Any], ...]
    sizes: list[int]
    empty: tuple[tuple[Mapping[str, Any], str], ...]
    groups: tuple[tuple[Mapping[str, Any], list[str]], ...]
    is_derived: bool

    @property
    def is_current(self) -> bool:
        """Whether all objects of the state are the ones that the walk found."""
        # Runs at every step over all tensors, none of which is in the processor's caches then:
        # `map` touches as little memory as possible.
        return (
            not self.is_derived
            and list(map(len, self.sized)) == self.sizes
            and not any(isinstance(holder.get(name), torch.Tensor) for holder, name in self.empty)
            and all(map(operator.is_, map(dict.get, self.containers, self.names), self.tensors))
            and all(map(operator.is_, map(_LOCAL, self.sharded), self.shards))
        )

    @property
    def has_moved(self) -> bool:
        """Whether any tensor has other memory than at the walk."""
        return any(tensor.has_moved for tensor in self.live)


class LiveStateReader:
    """Captures the state of one model and its optimizers, at every step.

    The walk over modules and optimizers is done once, and repeated when an object in it has been
    replaced; otherwise a capture only compares identities. It does not detect that a tensor was
    given other memory (`p.data = ...`): `Snapshotter` detects it while it copies, after which the
    caller calls `invalidate_if_moved`.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], fused: FusedTensors = NOT_FUSED
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._parameters = ModelParameters(model, fused)
        self._tied: dict[str, str] = {}
        self._parts: dict[str, Json] = {}
        self._scanned: _ScannedState | None = None

    def capture(self) -> LiveState:
        """Return the current state. Its tensors are the live memory, which the next step changes.

        Raises:
            LayoutMismatch: part of the state cannot be stored; the message names it.
        """
        scanned = self._scanned
        if scanned is None or not scanned.is_current:
            scanned = self._scanned = self._scan()
        scalars = {key: as_json_value(key, slots[slot]) for key, slots, slot in scanned.scalars}
        groups = [
            {"parameters": names, "options": options_of(group)} for group, names in scanned.groups
        ]
        documents = {GROUPS: groups, SCALARS: scalars, TIED: self._tied}
        return LiveState(scanned.live, documents | ({PARTS: self._parts} if self._parts else {}))

    def invalidate_if_moved(self) -> None:
        """Repeat the walk at the next capture if any tensor has been given other memory."""
        if self._scanned is not None and self._scanned.has_moved:
            self._scanned = None

    def _scan(self) -> _ScannedState:
        parameters = self._parameters
        state, containers = self._model_state()
        self._tied = _tied_names(state)
        self._parts = parameters.part_tables(state)
        live: list[LiveTensor] = []
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        scalars: list[tuple[str, Mapping[str, Any], str]] = []
        sized: list[Mapping[Any, Any]] = [holder for holder, _ in containers.values()]
        empty: list[tuple[Mapping[str, Any], str]] = [
            (holder, leaf) for holder, leaf in containers.values() if holder[leaf] is None
        ]
        is_derived = False
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name not in self._tied:
                holder, leaf = containers.get(name, ({name: value}, name))
                is_derived = is_derived or name not in containers or holder[leaf] is not value
                places.append((holder, leaf, value))
                live += parameters.describe(name, value)
            elif not isinstance(value, torch.Tensor | None):
                raise LayoutMismatch(
                    f"model/{name}: extra state of type {type(value).__name__} cannot be stored"
                )
        live += parameters.describe_units()
        for unit in parameters.units:
            places.append((vars(unit.handle), "flat_param", unit.flat))
            self._tied.update(unit.tied)
        groups: list[tuple[Mapping[str, Any], list[str]]] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                names = [name for held in group["params"] for name in parameters.names(held)]
                groups.append((group, names))
            optimizer_state = slots_of(optimizer)
            sized.append(optimizer_state)
            for parameter, slots in optimizer_state.items():
                sized.append(slots)
                for slot, value in slots.items():
                    if isinstance(value, torch.Tensor):
                        places.append((slots, slot, value))
                        live += parameters.describe_slot(parameter, slot, value)
                    else:
                        scalars += [
                            (f"{name}/{slot}", slots, slot) for name in parameters.shapes(parameter)
                        ]
                        empty.append((slots, slot))
        sharded = tuple(tensor for *_, tensor in places if isinstance(tensor, DTensor))
        return _ScannedState(
            live=tuple(live),
            containers=tuple(holder for holder, *_ in places),
            names=tuple(name for _, name, _ in places),
            tensors=tuple(tensor for *_, tensor in places),
            sharded=sharded,
            shards=tuple(map(local_of, sharded)),
            scalars=tuple(scalars),
            sized=tuple(sized),
            sizes=[len(holder) for holder in sized],
            empty=tuple(empty),
            groups=tuple(groups),
            is_derived=is_derived,
        )

    def _model_state(self) -> tuple[dict[str, Any], dict[str, tuple[dict[str, Any], str]]]:
        """Return the model's tensors by name, and the module dictionaries that hold them.

        The parameters of FSDP1 units are not among them.
        """
        if self._parameters.units:
            containers = unmanaged_containers(self._model, self._parameters.units)
            return {name: holder[leaf] for name, (holder, leaf) in containers.items()}, containers
        # Calling this first also makes FSDP2 put its sharded parameters back in place.
        state = self._model.state_dict(keep_vars=True)
        return state, _containers_by_name(self._model)


def _containers_by_name(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the module dictionary and the key in it of each parameter and buffer, by full name."""
    return {
        f"{path}.{leaf}" if path else leaf: (holder, leaf)
        for path, module in model.named_modules(remove_duplicate=False)
        for holder in (module._parameters, module._buffers)
        for leaf in holder
    }


def _tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Map every further name of shared memory to its first name; memory decides, not identity."""
    first: dict[object, str] = {}
    tied = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = local_of(value)
        # A tensor without memory (empty, or on the meta device) can only be compared by identity.
        memory: object = id(value)
        if local.data_ptr():
            memory = (local.data_ptr(), value.shape, local.stride(), local.dtype, local.device)
        if first.setdefault(memory, name) != name:
            tied[name] = first[memory]
    return tied
