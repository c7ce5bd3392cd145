"""Finds tensors that a module's `state_dict` computes, and loads them back into the module.

They are an extra state that is a tensor (Transformer Engine's), and results of hooks: weights in
another data type or layout, parts of a packed one. They share no memory with the module, so that
filling them changes nothing: once they are filled, the module's own `load_state_dict` takes them,
with all its other entries. A tensor that it does not take has to be equal in the module already.

A tensor is the module's memory if it shares that of a parameter or buffer, or if `state_dict`
returns the same memory twice. An extra state never counts as such: `set_extra_state` is to have it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from keepstep.checkpoint.live.tensors import (
    LiveState,
    as_bytes,
    dtype_name,
    local_of,
    plain,
    torch_dtype,
)
from keepstep.torch_internals import (
    load_state_dict_pre_hooks,
    own_buffers,
    own_parameters,
    set_state_dict_versions,
    state_dict_versions,
)

_EXTRA_STATE = "_extra_state"
_OF_TORCH = ("torch.nn.", "torch.distributed.", "torch._dynamo.", "torch.fx.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedTensors:
    """Holds the result of a module's `state_dict`, and the entries that it has computed.

    Attributes:
        model: the module.
        entries: the result of its `state_dict`.
        names: names in `entries` of computed tensors that `load_state_dict` takes, by their keys.
        constants: names in `entries` of those that it does not take, by their keys.
        optional: the names that may be missing, with the module's own values for them.
    """

    model: nn.Module
    entries: Mapping[str, Any]
    names: Mapping[str, str]
    constants: Mapping[str, str]
    optional: Mapping[str, torch.Tensor]

    def load(self) -> None:
        """Give the module the computed tensors, after they are filled.

        Raises:
            LayoutMismatch: its `load_state_dict` failed.
        """
        values = self.optional.items()
        if len(self.optional) == len(self.names) and all(
            torch.equal(before, self.entries[name]) for name, before in values
        ):
            return
        try:
            self.model.load_state_dict(self.entries)
        except Exception as error:
            first = min(self.names)
            more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
            raise LayoutMismatch(
                f"{first}{more}: computed by state_dict() of the module, whose load_state_dict() "
                f"does not take it: {type(error).__name__}: {error}"
            ) from error


class ComputedFinder:
    """Finds the tensors that a module's `state_dict` computes, at every capture.

    Args:
        model: the module.
        clean: returns a name in it without those of wrappers.
    """

    def __init__(self, model: nn.Module, clean: Callable[[str], str]) -> None:
        self._model = model
        self._clean = clean
        self._is_computed: dict[str, bool] = {}

    def find(self, state: Mapping[str, Any]) -> ComputedTensors | None:
        """Return the computed entries of `state_dict(keep_vars=True)`; None if there are none.

        Raises:
            LayoutMismatch: `load_state_dict` does not take a computed entry, and the module is
                trained, so that it may change.
        """
        memory = _memory_of(self._model)
        apart = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and _place_of(value) not in memory
        }
        if not apart:
            return None
        if not apart.keys() <= self._is_computed.keys():
            again = self._model.state_dict(keep_vars=True)
            for name, value in apart.items():
                self._is_computed[name] = is_extra_state(name) or not _has_same(
                    again.get(name), value
                )
        computed = [name for name in apart if self._is_computed[name]]
        if not computed:
            return None
        modules = _Modules(self._model, self._clean)
        taken = {name for name in computed if modules.takes(self._clean(name))}
        for name in computed:
            if name not in taken:
                modules.check_frozen(self._clean(name))
        return ComputedTensors(
            model=self._model,
            entries=state,
            names={self._key(name): name for name in computed if name in taken},
            constants={self._key(name): name for name in computed if name not in taken},
            optional={
                name: apart[name].detach().clone()
                for name in taken
                if not modules.is_own(self._clean(name))
            },
        )

    def _key(self, name: str) -> str:
        return f"{MODEL_PREFIX}{self._clean(name)}"


def is_extra_state(name: str) -> bool:
    """Return whether a tensor of this name or key is the extra state of a module."""
    return name.removeprefix(MODEL_PREFIX).rpartition(".")[2] == _EXTRA_STATE


def fit_computed(live: LiveState, source: Source) -> LiveState:
    """Return a live state whose extra states have the shapes of the source's, to be filled.

    Raises:
        LayoutMismatch: a tensor that the module computes and does not take has another value in the
            source; the message names it.
    """
    computed = live.computed
    if computed is None:
        return live
    for key, name in computed.constants.items():
        _check_equal(key, computed.entries[name], source)
    fitted: dict[int, torch.Tensor] = {}
    tensors = list(live.tensors)
    for number, tensor in enumerate(tensors):
        own_name = computed.names.get(tensor.key, "")
        spec = source.tensors.get(tensor.key) if own_name else None
        if spec is None or not is_extra_state(own_name):
            continue
        value = computed.entries[own_name]
        dtype = torch_dtype(spec.dtype)
        if (dtype, spec.shape) != (value.dtype, tuple(value.shape)):
            new = torch.zeros(spec.shape, dtype=dtype, device=value.device)
            fitted[id(value)] = new
            box = Box.whole(spec.shape)
            tensors[number] = replace(
                tensor, global_shape=spec.shape, box=box, data=new, owner=None
            )
    entries = OrderedDict(
        (name, fitted.get(id(value), value)) for name, value in computed.entries.items()
    )
    # The versions of the modules' formats, which `load_state_dict` reads there.
    set_state_dict_versions(entries, state_dict_versions(computed.entries))
    return LiveState(tuple(tensors), live.documents, replace(computed, entries=entries))


def _check_equal(key: str, value: torch.Tensor, source: Source) -> None:
    """Check that a tensor that a module does not take is the same in a source that has it."""
    spec = source.tensors.get(key)
    if spec is None:
        return
    own = plain(local_of(value).detach())
    is_same = (spec.dtype, spec.shape) == (dtype_name(own.dtype), tuple(own.shape))
    if is_same and own.numel():
        stored = torch.empty_like(own, memory_format=torch.contiguous_format)
        source.read([BoxRequest(key, Box.whole(spec.shape), as_bytes(stored))])
        is_same = bytes(as_bytes(stored)) == bytes(as_bytes(own))
    if not is_same:
        raise LayoutMismatch(
            f"{key}: computed by state_dict() of the module, whose load_state_dict() does not take "
            "it, and different in the source; make the module in the same way as before, or load "
            "its tensors with its package's own functions"
        )


class _Modules:
    """The modules of a model by name without wrappers, and the entries that they take back."""

    def __init__(self, model: nn.Module, clean: Callable[[str], str]) -> None:
        self._by_path: dict[str, list[nn.Module]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._by_path.setdefault(clean(path), []).append(module)

    def is_own(self, name: str) -> bool:
        """Return whether an entry is an extra state, or called as a parameter or buffer."""
        path, leaf = self._split(name)
        return leaf == _EXTRA_STATE or any(
            leaf in own_parameters(module) or leaf in own_buffers(module)
            for module in self._by_path[path]
        )

    def takes(self, name: str) -> bool:
        """Return whether `load_state_dict` takes an entry, as far as the classes show."""
        path, leaf = self._split(name)
        if leaf == _EXTRA_STATE:
            return any(is_overridden(m, "set_extra_state") for m in self._by_path[path])
        return self.is_own(name) or any(
            is_overridden(module, "load_state_dict")
            or is_overridden(module, "_load_from_state_dict")
            or has_foreign_hooks(load_state_dict_pre_hooks(module))
            for above in self._paths_above(path)
            for module in self._by_path.get(above, ())
        )

    def check_frozen(self, name: str) -> None:
        """Refuse an entry of a trained module that nothing takes back."""
        path, _ = self._split(name)
        modules = self._by_path[path]
        if any(p.requires_grad for module in modules for p in module.parameters(recurse=False)):
            raise LayoutMismatch(
                f"{MODEL_PREFIX}{name}: computed by state_dict() of {type(modules[-1]).__name__}, "
                "whose load_state_dict() does not take it back, so that it could be saved and "
                "never loaded; keep it in a buffer, or give the module set_extra_state()"
            )

    def _split(self, name: str) -> tuple[str, str]:
        """Return the path of the innermost module that an entry's name is within, and the rest."""
        path = next(path for path in self._paths_above(name) if path in self._by_path)
        return path, name[len(path) + 1 :] if path else name

    @staticmethod
    def _paths_above(name: str) -> Iterator[str]:
        while name:
            yield name
            name = name.rpartition(".")[0]
        yield ""


def is_overridden(module: nn.Module, method: str) -> bool:
    """Return whether a module has a method of another class than torch's own modules."""
    if method in vars(module):
        return True
    definer = next(kind for kind in type(module).__mro__ if method in vars(kind))
    return not f"{definer.__module__}.".startswith(_OF_TORCH)


def has_foreign_hooks(hooks: Mapping[int, Any]) -> bool:
    """Return whether any of a module's hooks is not torch's own, such as that of a wrapper."""
    for hook in hooks.values():
        function = getattr(hook, "hook", hook)
        function = getattr(function, "func", function)
        if not f"{getattr(function, '__module__', '')}.".startswith(_OF_TORCH):
            return True
    return False


def _memory_of(model: nn.Module) -> Collection[object]:
    """Return the places of a module's parameters and buffers."""
    return {
        _place_of(tensor)
        for module in model.modules()
        for tensors in (own_parameters(module), own_buffers(module))
        for tensor in tensors.values()
        if tensor is not None
    }


def _place_of(tensor: torch.Tensor) -> object:
    """Return a key that tensors sharing memory have in common; one without memory has its own."""
    local = local_of(tensor)
    if local.is_meta or type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return id(tensor)
    return local.untyped_storage().data_ptr() or id(tensor)


def _has_same(again: object, value: torch.Tensor) -> bool:
    """Return whether another call gave the same memory; both are alive, so neither is reused."""
    return again is value or (
        isinstance(again, torch.Tensor)
        and _place_of(again) == _place_of(value)
        and local_of(again).data_ptr() == local_of(value).data_ptr()
    )
