"""Locates parameters in FSDP1's flat ones (`torch.distributed.fsdp.FullyShardedDataParallel`).

FSDP1 puts the parameters of a unit one after the other into one flat tensor, pads it, and cuts it
into equal shards. The ranges of parameters in this rank's shard are read from the unit's handle;
nothing is communicated. With `use_orig_params=True` optimizers hold 1-D views of the shard, one for
each parameter; else they hold the shard itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.wrapper_names import without_wrappers
from keepstep.checkpoint.live.computed import has_foreign_hooks, is_overridden
from keepstep.checkpoint.live.flat_fragment import describe_range
from keepstep.checkpoint.live.tensors import LiveTensor, local_of
from keepstep.torch_internals import (
    FLAT_PARAMETER,
    flat_infos,
    flat_names,
    flat_places,
    flat_views,
    fsdp1_handle,
    is_gathered,
    non_persistent_buffers,
    own_buffers,
    own_parameters,
    state_dict_hooks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRange:
    """The elements of a parameter that this rank holds in a flat tensor; numbers in elements.

    Attributes:
        name: the parameter's name in the model, without the names of wrappers.
        shape: the parameter's shape.
        start: the place of the first held element in the flattened parameter.
        count: how many are held; 0 if none is.
        offset: the place of the first held element in the flat tensor.
        is_all: whether the flat tensor holds these elements only.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    offset: int = 0
    is_all: bool = False

    def describe(self, key: str, holder: torch.Tensor) -> tuple[LiveTensor, ...]:
        """Return the boxes of the tensor `key` that a holder of this form has.

        Args:
            key: the name of the parameter, or of a slot that has its shape.
            holder: the flat parameter, a view of it, or a slot of its local shape.

        Raises:
            LayoutMismatch: the parameter is not sharded now.
        """
        local = local_of(holder).detach()
        if self.is_all and local.numel() != self.count:
            raise LayoutMismatch(
                f"{key}: has {local.numel()} elements now, this rank's shard has {self.count}; "
                "leave FSDP.summon_full_params before"
            )
        flat = local.reshape(-1)[self.offset : self.offset + self.count]
        return describe_range(key, self.shape, self.start, flat, owner=holder)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatUnit:
    """One unit of FSDP1 and its flat parameter.

    Attributes:
        handle: FSDP1's handle of the flat parameter.
        ranges: this rank's elements of each of the unit's parameters, in the flat parameter.
        tied: the further names of shared parameters, with their first names.
        places: the modules' dictionaries, by identity, and the names in them that the unit manages.
    """

    handle: Any
    ranges: tuple[HeldRange, ...]
    tied: Mapping[str, str]
    places: frozenset[tuple[int, str]]

    @property
    def flat(self) -> torch.Tensor:
        """The flat parameter; `local_of` returns this rank's shard of it."""
        flat: torch.Tensor = self.handle.flat_param
        return flat

    def holders(self) -> Iterator[tuple[torch.Tensor, tuple[HeldRange, ...]]]:
        """Yield the tensors that optimizers hold, with the ranges of parameters in them.

        These tensors count the writes to a parameter.
        """
        originals: list[torch.Tensor] | None = flat_views(self.handle.flat_param)
        if originals is None:
            yield self.flat, self.ranges
            return
        for original, held in zip(originals, self.ranges, strict=True):
            yield original, (replace(held, offset=0, is_all=True),)


def flat_units(model: nn.Module) -> tuple[FlatUnit, ...]:
    """Return the FSDP1 units of a model; none for most models.

    Raises:
        LayoutMismatch: a unit holds parameters in a form that is not read here.
    """
    # Nobody has made an instance of a class that is not imported.
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is None:
        return ()
    return tuple(
        _unit(_prefix(without_wrappers(path)), handle)
        for path, module in model.named_modules()
        if isinstance(module, fsdp.FullyShardedDataParallel)
        and (handle := fsdp1_handle(module)) is not None
    )


def reshard(model: nn.Module, units: Iterable[FlatUnit]) -> None:
    """Make FSDP's units free the whole parameters that they have gathered.

    After a forward pass without a backward one, as in an evaluation, some have not. Then a module
    has other parameters than its optimizer, and would go on computing with the gathered ones after
    its shards are filled. It is done on this rank alone.

    Args:
        model: the model, with units of FSDP2 or without.
        units: its units of FSDP1.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
    for unit in units:
        gathered = is_gathered(unit.flat) and not unit.handle.needs_unshard()
        if unit.handle.uses_sharded_strategy and gathered:
            unit.handle.reshard(free_unsharded_flat_param=True)


def unmanaged_containers(
    model: nn.Module, units: tuple[FlatUnit, ...]
) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the places of tensors that belong to no unit, by their names in a `state_dict`.

    A `state_dict` of FSDP1 would gather all parameters.

    Returns:
        The module's dictionary of each parameter and persistent buffer, and the key in it.

    Raises:
        LayoutMismatch: a module has extra state, or computes its `state_dict`.
    """
    managed = frozenset[tuple[int, str]]().union(*(unit.places for unit in units))
    containers: dict[str, tuple[dict[str, Any], str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise LayoutMismatch(
                f"model/{without_wrappers(path)}: extra state of a module cannot be stored; keep "
                "it in a buffer"
            )
        if (
            is_overridden(module, "state_dict")
            or is_overridden(module, "_save_to_state_dict")
            or has_foreign_hooks(state_dict_hooks(module))
        ):
            raise LayoutMismatch(
                f"model/{without_wrappers(path)}: a {type(module).__name__} computes its "
                "state_dict(), which would gather all parameters of FSDP1, and is not called; use "
                "fully_shard"
            )
        parameters, buffers = own_parameters(module), own_buffers(module)
        persistent = buffers.keys() - non_persistent_buffers(module)
        leaves: list[tuple[dict[str, Any], str]] = [(parameters, leaf) for leaf in parameters]
        leaves += [(buffers, leaf) for leaf in buffers if leaf in persistent]
        for holder, leaf in leaves:
            if leaf != FLAT_PARAMETER and (id(module), leaf) not in managed:
                name = without_wrappers(f"{path}.{leaf}" if path else leaf)
                containers[name] = (holder, leaf)
    return containers


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _unit(prefix: str, handle: Any) -> FlatUnit:
    flat = handle.flat_param
    names = [prefix + without_wrappers(name) for name in flat_names(flat)]
    ranges = []
    for name, (shape, contiguous, extension, info) in zip(names, flat_places(flat), strict=True):
        if extension is not None:
            raise LayoutMismatch(
                f"{name}: FSDP1 over tensor parallelism cannot be stored; use fully_shard"
            )
        if not contiguous:
            raise LayoutMismatch(
                f"{name}: FSDP1 has flattened it in the order of its memory, which is not that of "
                "its elements; make it contiguous before it is wrapped"
            )
        held = info.in_shard and info.numel_in_shard > 0
        ranges.append(
            HeldRange(
                name=name,
                shape=tuple(shape),
                start=info.intra_param_start_idx if held else 0,
                count=info.numel_in_shard if held else 0,
                offset=info.offset_in_shard if held else 0,
            )
        )
    infos, shared_infos = flat_infos(flat)
    tied = {
        _joined(prefix, shared.module_name, shared.param_name): _joined(
            prefix, shared.prim_module_name, shared.prim_param_name
        )
        for shared in shared_infos
    }
    places = frozenset((id(info.module), info.param_name) for info in (*infos, *shared_infos))
    return FlatUnit(handle=handle, ranges=tuple(ranges), tied=tied, places=places)


def _joined(prefix: str, module_name: str, leaf: str) -> str:
    return prefix + without_wrappers(f"{module_name}.{leaf}" if module_name else leaf)
