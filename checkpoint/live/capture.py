"""Reading the state of a model and its optimizers again and again, for little: once found, it is only looked at whether all is still there."""

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


@dataclass(frozen=True, slots=True)
class _ScannedState:
    """Everything found in one walk over the state, good while nothing in it has been replaced.

    `containers[i][names[i]]` is `found[i]`; `sharded` are those that are DTensors, and `shards` their local tensors. `sized` are all
    dictionaries with tensors in them, and `sizes` how many each had; `empty` are places that held no tensor and may come to.
    `is_derived` is True if a state hook makes tensors anew at every call: then nothing found before can be trusted.
    """

    live: tuple[LiveTensor, ...]
    containers: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    found: tuple[torch.Tensor, ...]
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
        # Runs at every step over all tensors, none of which is in the processor's caches then: `map` does no more than it must.
        return (
            not self.is_derived
            and list(map(len, self.sized)) == self.sizes
            and not any(isinstance(holder.get(name), torch.Tensor) for holder, name in self.empty)
            and all(map(operator.is_, map(dict.get, self.containers, self.names), self.found))
            and all(map(operator.is_, map(_LOCAL, self.sharded), self.shards))
        )

    @property
    def has_moved(self) -> bool:
        """Whether something has other memory than when it was found."""
        return any(tensor.has_moved for tensor in self.live)


class LiveStateReader:
    """Reads the state of one model and its optimizers, again and again.

    The walk over modules and optimizers is done once, and again when something in it is no longer the same
    object; a capture otherwise only compares identities, for it runs at every step. Memory that was put under a tensor that
    stayed (`p.data = ...`) is not looked for: `Snapshotter` notices it while it copies, and `invalidate_if_moved` mends it.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._names = parameter_names(model)
        self._tied: dict[str, str] = {}
        self._scanned: _ScannedState | None = None

    def capture(self) -> LiveState:
        """Return the state as it is now. Its tensors are the live memory: the next step shows through.

        Raises:
            LayoutMismatch: something in it cannot be stored; the message names it.
        """
        bound = self._scanned
        if bound is None or not bound.is_current:
            bound = self._scanned = self._scan()
        scalars = {key: as_json_value(key, slots[slot]) for key, slots, slot in bound.scalars}
        groups = [
            {"parameters": names, "options": options_of(group)} for group, names in bound.groups
        ]
        return LiveState(bound.live, {GROUPS: groups, SCALARS: scalars, TIED: self._tied})

    def invalidate_if_moved(self) -> None:
        """Walk anew at the next capture if any tensor has been given other memory."""
        if self._scanned is not None and self._scanned.has_moved:
            self._scanned = None

    def _scan(self) -> _ScannedState:
        # Calling this first also makes FSDP put its sharded parameters back in place.
        state = self._model.state_dict(keep_vars=True)
        self._tied = _tied_names(state)
        homes = _containers_by_name(self._model)
        places: list[tuple[dict[str, Any], str, str, torch.Tensor]] = []
        scalars: list[tuple[str, Mapping[str, Any], str]] = []
        sized: list[Mapping[Any, Any]] = [holder for holder, _ in homes.values()]
        empty: list[tuple[Mapping[str, Any], str]] = [
            (holder, leaf) for holder, leaf in homes.values() if holder[leaf] is None
        ]
        is_derived = False
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name not in self._tied:
                holder, leaf = homes.get(name, ({name: value}, name))
                is_derived = is_derived or name not in homes or holder[leaf] is not value
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
        sharded = tuple(found for *_, found in places if isinstance(found, DTensor))
        return _ScannedState(
            live=tuple(describe(key, found) for _, _, key, found in places),
            containers=tuple(holder for holder, *_ in places),
            names=tuple(name for _, name, *_ in places),
            found=tuple(found for *_, found in places),
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
    """Return the module dictionary that holds each parameter and buffer, by full name."""
    return {
        f"{path}.{leaf}" if path else leaf: (holder, leaf)
        for path, module in model.named_modules(remove_duplicate=False)
        for holder in (module._parameters, module._buffers)
        for leaf in holder
    }


def _tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return, for every later name of shared memory, the first; memory decides, not identity."""
    first: dict[object, str] = {}
    tied = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = local_of(value)
        # Without memory (empty, or on the meta device) only identity is left to compare.
        where: object = id(value)
        if local.data_ptr():
            where = (local.data_ptr(), value.shape, local.stride(), local.dtype, local.device)
        if first.setdefault(where, name) != name:
            tied[name] = first[where]
    return tied
