"""Captures the state of a model and its optimizers at every step, at low cost.

The first capture walks over modules and optimizers; later ones only check that the same objects are
still in place.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.descriptions import (
    NOT_DESCRIBED,
    Descriptions,
    describing_documents,
)
from keepstep.checkpoint.format.layout.documents import (
    GROUPS,
    SCALARS,
    SUBCLASSES,
    TIED,
    WITHOUT_SLOTS,
)
from keepstep.checkpoint.format.layout.names import is_text
from keepstep.checkpoint.format.layout.source import TensorSpec
from keepstep.checkpoint.live.averages import averages_in, stored_averages
from keepstep.checkpoint.live.computed import ComputedFinder, ComputedTensors
from keepstep.checkpoint.live.flat_parameters import unmanaged_containers
from keepstep.checkpoint.live.model_parameters import ModelParameters, name_cleaner
from keepstep.checkpoint.live.optimizer_options import options_of
from keepstep.checkpoint.live.optimizer_rest import (
    REST,
    PendingRest,
    Rest,
    first_name,
    pending_of,
    rest_of,
    tells_its_state,
)
from keepstep.checkpoint.live.optimizer_state import local_groups, parameter_slots, slots_of
from keepstep.checkpoint.live.storable import (
    check_fillable,
    check_storable,
    is_made_of_tensors,
    subclass_of,
    tensors_within,
)
from keepstep.checkpoint.live.tensor_values import SlotEncoder, has_other_strides
from keepstep.checkpoint.live.tensors import (
    LiveState,
    LiveTensor,
    check_disjoint,
    describe,
    is_one_of_several,
    local_of,
    specs_of,
)
from keepstep.torch_internals import own_buffers, own_modules, own_parameters

_LOCAL = operator.attrgetter("_local_tensor")
_PARAMETERS = operator.itemgetter("params")
_SCALAR = bool | int | float | str | None

_Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScannedOptimizer:
    """The objects that one optimizer consisted of at a walk over the state."""

    optimizer: Optimizer
    state: Mapping[Any, Any]
    slots: tuple[Any, ...]
    groups: tuple[Mapping[str, Any], ...]
    parameters: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """Return the objects that an optimizer consists of now."""
        state = slots_of(optimizer)
        return cls(
            optimizer=optimizer,
            state=state,
            slots=tuple(state.values()),
            groups=tuple(optimizer.param_groups),
            parameters=tuple(chain.from_iterable(map(_PARAMETERS, optimizer.param_groups))),
        )

    @property
    def is_current(self) -> bool:
        """Whether it consists of the same objects: its state, its slots, groups and parameters."""
        groups = self.optimizer.param_groups
        return (
            slots_of(self.optimizer) is self.state
            and _are_same(self.state.values(), self.slots)
            and _are_same(groups, self.groups)
            and _are_same(list(chain.from_iterable(map(_PARAMETERS, groups))), self.parameters)
        )


def _are_same(found: Collection[object], expected: Collection[object]) -> bool:
    """Return whether two collections have the same objects in the same order."""
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScannedState:
    """The result of one walk over the state, valid until an object in it is replaced.

    Attributes:
        live: the tensors, as boxes; some have several.
        containers: the dictionary that holds each tensor and each module: `containers[i][names[i]]`
            is `held[i]`.
        names: the key of each in its container.
        held: the tensors and the modules.
        sharded: the tensors that are DTensors.
        shards: the local tensors of `sharded`.
        scalars: optimizer slots that are numbers, as (document key, slots, slot).
        encoded: optimizer slots that are neither tensors nor numbers, as JSON, by document key.
        sized: all dictionaries that hold tensors or modules.
        sizes: the number of items in each of `sized`.
        empty: places without a tensor that may get one or another value, as (dictionary, key).
        groups: optimizer groups, with the names of their parameters, and the optimizer.
        without_slots: names of parameters without slots on any rank.
        optimizers: the objects that the optimizers consist of.
        computed: the tensors that are not the module's memory.
        is_derived: a state hook makes new tensors at every call, or an optimizer has tensors
            inside of other values, so the walk must be repeated.
    """

    live: tuple[LiveTensor, ...]
    containers: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    held: tuple[torch.Tensor | nn.Module | None, ...]
    sharded: tuple[torch.Tensor, ...]
    shards: tuple[torch.Tensor, ...]
    scalars: tuple[tuple[str, Mapping[str, Any], str], ...]
    encoded: Mapping[str, Json]
    sized: tuple[Mapping[Any, Any], ...]
    sizes: list[int]
    empty: tuple[tuple[Mapping[str, Any], str], ...]
    groups: tuple[tuple[Optimizer, Mapping[str, Any], list[str]], ...]
    without_slots: tuple[str, ...]
    optimizers: tuple[_ScannedOptimizer, ...]
    computed: ComputedTensors | None
    is_derived: bool

    @property
    def is_current(self) -> bool:
        """Whether all objects of the state are the ones that the walk found."""
        # Runs at every step over all tensors, none of which is in the processor's caches then:
        # `map` touches as little memory as possible.
        return (
            not self.is_derived
            and all(optimizer.is_current for optimizer in self.optimizers)
            and list(map(len, self.sized)) == self.sizes
            and all(isinstance(holder.get(name), _SCALAR) for holder, name in self.empty)
            and all(map(operator.is_, map(dict.get, self.containers, self.names), self.held))
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
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        descriptions: Descriptions = NOT_DESCRIBED,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._descriptions = descriptions
        self._averages = averages_in(model)
        self._finder = ComputedFinder(model, name_cleaner(model))
        self._tied: dict[str, Json] = {}
        self._subclasses: dict[str, Json] = {}
        self._described: tuple[_ScannedState, _Specs, dict[str, Json]] | None = None
        self._scanned: _ScannedState | None = None

    def capture(self, other_tensors: Iterable[LiveTensor] = ()) -> LiveState:
        """Return the current state. Its tensors are the live memory, which the next step changes.

        Args:
            other_tensors: tensors of the state that are not the module's or an optimizer's. They
                are not in the result, but their descriptions are, and those of others that name
                them.

        Raises:
            LayoutMismatch: part of the state cannot be stored, or a description contradicts it;
                the message names it.
        """
        scanned = self._current()
        scalars = {key: slots[slot] for key, slots, slot in scanned.scalars}
        groups = [
            {"parameters": names, "options": options_of(optimizer, group)}
            for optimizer, group, names in scanned.groups
        ]
        return LiveState(
            scanned.live,
            {
                GROUPS: groups,
                SCALARS: {**scalars, **scanned.encoded},
                TIED: self._tied,
                **({SUBCLASSES: self._subclasses} if self._subclasses else {}),
                **({WITHOUT_SLOTS: scanned.without_slots} if scanned.without_slots else {}),
                **self._describing(scanned, specs_of(other_tensors)),
            },
            scanned.computed,
        )

    def tensors(self) -> tuple[LiveTensor, ...]:
        """Return the tensors of the current state. Raises as `capture` does."""
        return self._current().live

    def invalidate_if_moved(self) -> None:
        """Repeat the walk at the next capture if any tensor has been given other memory."""
        if self._scanned is not None and self._scanned.has_moved:
            self._scanned = None

    def _current(self) -> _ScannedState:
        """Return the last walk over the state if it is still valid, otherwise that of a new one."""
        if self._scanned is None or not self._scanned.is_current:
            self._scanned = self._scan()
        return self._scanned

    def _describing(self, scanned: _ScannedState, other_tensors: _Specs) -> dict[str, Json]:
        """Return the documents on all tensors, made again only if the tensors are others."""
        if self._described is not None:
            described, others, documents = self._described
            if described is scanned and others == other_tensors:
                return documents
        specs = {**specs_of(scanned.live), **other_tensors}
        # The caller's names take precedence over found ones.
        averages = {**stored_averages(self._averages, specs), **self._descriptions.averages}
        documents = describing_documents(
            replace(self._descriptions, averages=averages), specs, is_whole=not is_one_of_several()
        )
        self._described = (scanned, other_tensors, documents)
        return documents

    def _scan(self) -> _ScannedState:
        parameters = ModelParameters(self._model, self._descriptions)
        entries, containers, computed = self._model_state(parameters)
        state, self._subclasses = _divided(entries, containers)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                check_storable(f"model/{name}", local_of(value))
        self._tied = _tied_names(state)
        live: list[LiveTensor] = []
        places: list[tuple[dict[str, Any], str, torch.Tensor | nn.Module | None]] = []
        scalars: list[tuple[str, Mapping[str, Any], str]] = []
        modules = list(self._model.modules())
        sized: list[Mapping[Any, Any]] = [
            holder
            for module in modules
            for holder in (own_modules(module), own_parameters(module), own_buffers(module))
        ]
        empty: list[tuple[Mapping[str, Any], str]] = [
            (holder, leaf) for holder, leaf in containers.values() if holder[leaf] is None
        ]
        for module in modules:
            children = own_modules(module)
            places += [(children, name, child) for name, child in children.items()]
        is_derived = False
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name not in self._tied:
                holder, leaf = containers.get(name, ({name: value}, name))
                is_derived = is_derived or name not in containers or holder[leaf] is not value
                places.append((holder, leaf, value))
                live += parameters.describe(name, value)
            elif not isinstance(value, torch.Tensor | None):
                raise LayoutMismatch(
                    f"model/{name}: extra state of type {type(value).__name__} cannot be stored; "
                    "have get_extra_state return a tensor, or pass the value under a name of its "
                    'own next to "model"'
                )
        live += parameters.describe_units()
        for unit in parameters.units:
            places.append((vars(unit.handle), "flat_param", unit.flat))
            self._tied.update(unit.tied)
        encoded: dict[str, Json] = {}
        for optimizer in self._optimizers:
            rest = _rest_of(optimizer, parameters)
            is_derived = is_derived or rest is not None or tells_its_state(optimizer)
            if rest is not None:
                first = first_name(optimizer, parameters)
                encoded[f"{first}/{REST}"] = rest.document
                live += [
                    describe(f"optim/{first}/{slot}", tensor)
                    for slot, tensor in rest.tensors.items()
                ]
                if rest.is_whole:
                    continue
            for parameter, slots in parameter_slots(optimizer):
                sized.append(slots)
                for slot, value in slots.items():
                    names = parameters.shapes(parameter)
                    if isinstance(value, torch.Tensor) and not (
                        SlotEncoder(slot, parameters, parameter, optimizer).divides(value)
                    ):
                        check_storable(_slot_key(parameters, parameter, slot), local_of(value))
                        places.append((slots, slot, value))
                        live += parameters.describe_slot(parameter, slot, value)
                        if has_other_strides(value, parameter):
                            noted = SlotEncoder(slot, parameters, parameter, optimizer)
                            encoded |= dict.fromkeys(
                                (f"{name}/{slot}" for name in names), noted.encode_tensor(value)
                            )
                    elif isinstance(value, _SCALAR) and is_text(str(value)):
                        scalars += [(f"{name}/{slot}", slots, slot) for name in names]
                        empty.append((slots, slot))
                    elif names and not isinstance(value, PendingRest):
                        is_derived = True
                        key = f"{next(iter(names))}/{slot}"
                        encoder = SlotEncoder(key, parameters, parameter, optimizer)
                        encoded |= dict.fromkeys(
                            (f"{name}/{slot}" for name in names), encoder.encode(value)
                        )
                        for inner, tensor in encoder.tensors.items():
                            live += parameters.describe_slot(parameter, inner, tensor)
        check_disjoint(live)
        for described in live:
            check_fillable(described.key, described.data)
        sharded = tuple(held for *_, held in places if isinstance(held, DTensor))
        return _ScannedState(
            live=tuple(live),
            containers=tuple(holder for holder, *_ in places),
            names=tuple(name for _, name, _ in places),
            held=tuple(held for *_, held in places),
            sharded=sharded,
            shards=tuple(map(local_of, sharded)),
            scalars=tuple(scalars),
            encoded=encoded,
            sized=tuple(sized),
            sizes=[len(holder) for holder in sized],
            empty=tuple(empty),
            groups=tuple(parameters.groups(self._optimizers)),
            without_slots=tuple(self._names_without_slots(parameters)),
            optimizers=tuple(map(_ScannedOptimizer.of, self._optimizers)),
            computed=computed,
            is_derived=is_derived,
        )

    def _names_without_slots(self, parameters: ModelParameters) -> Iterator[str]:
        """Yield the names of parameters without slots on any rank.

        Looking at this rank is not enough: where each rank updates some of the parameters, or an
        expert has got no token here yet, another rank has them.
        """
        for optimizer in self._optimizers:
            state = slots_of(optimizer)
            for group in local_groups(optimizer):
                is_plain = type(optimizer) is torch.optim.SGD and not group["momentum"]
                for parameter in group["params"]:
                    if not state.get(parameter) and (is_plain or not parameter.requires_grad):
                        yield from parameters.shapes(parameter)

    def _model_state(
        self, parameters: ModelParameters
    ) -> tuple[dict[str, Any], dict[str, tuple[dict[str, Any], str]], ComputedTensors | None]:
        """Return the model's tensors by name, their modules' dictionaries, and the computed ones.

        The parameters of FSDP1 units are not among them.
        """
        if parameters.units:
            containers = unmanaged_containers(self._model, parameters.units)
            held = {name: holder[leaf] for name, (holder, leaf) in containers.items()}
            return held, containers, None
        clean = parameters.clean
        entries = self._model.state_dict(keep_vars=True)
        cleaned = {clean(name): value for name, value in entries.items()}
        if len(cleaned) < len(entries):
            taken = Counter(map(clean, entries)).most_common(1)[0][0]
            raise LayoutMismatch(
                f"model/{taken}: a wrapper has a tensor of the same name as the module that it "
                "wraps; rename one of them"
            )
        return cleaned, _containers_by_name(self._model, clean), self._finder.find(entries)


def _rest_of(optimizer: Optimizer, parameters: ModelParameters) -> Rest | None:
    """Return an optimizer's `state_dict` entries, had or expected, other than slots and groups."""
    pending = pending_of(optimizer)
    return rest_of(optimizer, parameters) if pending is None else pending.rest


def _divided(
    state: Mapping[str, Any], containers: Mapping[str, tuple[dict[str, Any], str]]
) -> tuple[dict[str, Any], dict[str, Json]]:
    """Return a module's tensors, composite ones as their parts, and the composites by key."""
    divided: dict[str, Any] = {}
    subclasses: dict[str, Json] = {}
    for name, value in state.items():
        holder, leaf = containers.get(name, ({}, name))
        is_held = isinstance(value, torch.Tensor) and holder.get(leaf) is value
        if not is_held or not is_made_of_tensors(value):
            divided[name] = value
            continue
        subclasses[f"model/{name}"] = subclass_of(f"model/{name}", value)
        divided |= tensors_within(name, value)
    return divided, subclasses


def _slot_key(parameters: ModelParameters, parameter: torch.Tensor, slot: str) -> str:
    return f"optim/{next(iter(parameters.names(parameter)), '')}/{slot}"


def _containers_by_name(
    model: nn.Module, clean: Callable[[str], str]
) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the module dictionary and the key in it of each parameter and buffer, by full name."""
    return {
        clean(f"{path}.{leaf}" if path else leaf): (holder, leaf)
        for path, module in model.named_modules(remove_duplicate=False)
        for holder in (own_parameters(module), own_buffers(module))
        for leaf in holder
    }


def _tied_names(state: Mapping[str, Any]) -> dict[str, Json]:
    """Map every further name of shared memory to its first name; memory decides, not identity.

    A name of a matrix that is the transpose of an earlier one is mapped to an object that says so.
    """
    first: dict[object, str] = {}
    tied: dict[str, Json] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        local = local_of(value)
        # A tensor without memory (empty, or on the meta device) can only be compared by identity.
        memory: object = id(value)
        if local.data_ptr():
            memory = _memory_of(value.shape, local)
        # Sharding cuts a matrix and its transpose into different shards.
        if memory not in first and value.dim() == 2 and local is value and local.data_ptr():
            transposed = _memory_of(value.shape[::-1], local.t())
            if transposed in first:
                tied[name] = {"name": first[transposed], "transposed": True}
                continue
        if first.setdefault(memory, name) != name:
            tied[name] = first[memory]
    return tied


def _memory_of(shape: Sequence[int], local: torch.Tensor) -> object:
    return (local.data_ptr(), tuple(shape), local.stride(), local.dtype, local.device)
