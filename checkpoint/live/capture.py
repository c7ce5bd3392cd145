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
from keepstep.checkpoint.layout.documents import GROUPS, SCALARS, TIED
from keepstep.checkpoint.live.optimizer_options import (
    as_json_value,
    name_of,
    options_of,
    parameter_names,
)
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor, describe, local_of

_LOCAL = operator.attrgetter("_local_tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScannedState:
    """The result of one walk over the state, valid until an object in it is replaced.

    Attributes:
        live: the tensors, as boxes.
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

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._names = parameter_names(model)
        self._tied: dict[str, str] = {}
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
        return LiveState(scanned.live, {GROUPS: groups, SCALARS: scalars, TIED: self._tied})

    def invalidate_if_moved(self) -> None:
        """Repeat the walk at the next capture if any tensor has been given other memory."""
        if self._scanned is not None and self._scanned.has_moved:
            self._scanned = None

    def _scan(self) -> _ScannedState:
        # Calling this first also makes FSDP put its sharded parameters back in place.
        state = self._model.state_dict(keep_vars=True)
        self._tied = _tied_names(state)
        containers = _containers_by_name(self._model)
        places: list[tuple[dict[str, Any], str, str, torch.Tensor]] = []
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
                places.append((holder, leaf, f"model/{name}", value))
            elif not isinstance(value, torch.Tensor | None):
                raise LayoutMismatch(
                    f"model/{name}: extra state of type {type(value).__name__} cannot be stored"
                )
        groups: list[tuple[Mapping[str, Any], list[str]]] = []
        for optimizer in self._optimizers:
            sized.append(optimizer.state)
            for group in optimizer.param_groups:
                groups.append(
                    (group, [name_of(parameter, self._names) for parameter in group["params"]])
                )
            for parameter, slots in optimizer.state.items():
                sized.append(slots)
                name = name_of(parameter, self._names)
                for slot, value in slots.items():
                    if isinstance(value, torch.Tensor):
                        places.append((slots, slot, f"optim/{name}/{slot}", value))
                    else:
                        scalars.append((f"{name}/{slot}", slots, slot))
                        empty.append((slots, slot))
        sharded = tuple(tensor for *_, tensor in places if isinstance(tensor, DTensor))
        return _ScannedState(
            live=tuple(describe(key, tensor) for _, _, key, tensor in places),
            containers=tuple(holder for holder, *_ in places),
            names=tuple(name for _, name, *_ in places),
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
