"""Names a model's parameters, and locates an optimizer's parameters and slots in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.format.layout.wrapper_names import PARALLEL, without_wrappers
from keepstep.checkpoint.live.flat_parameters import (
    FlatUnit,
    HeldRange,
    flat_units,
    reshard,
)
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.storable import check_initialized, is_made_of_tensors
from keepstep.checkpoint.live.tensors import LiveTensor, describe, local_of, placed_like


def name_cleaner(model: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the names of wrapper modules from a name.

    Wrappers are those of data parallelism, FSDP1, `torch.compile` and activation checkpointing.

    Args:
        model: the model, whose tensors' and modules' names are cleaned.
    """
    parallel = frozenset(
        without_wrappers(f"{path}.{PARALLEL}" if path else PARALLEL)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, DistributedDataParallel | DataParallel)
    )
    return lambda name: without_wrappers(name, parallel)


class ModelParameters:
    """The parameters of a model, by the identity of the tensors that optimizers hold.

    Nearly always an optimizer holds a parameter of the model. With FSDP1 it holds a flat piece of
    one, or a flat piece of many one after the other. Units of FSDP free their gathered parameters:
    optimizers hold the shards.

    Args:
        model: names the parameters; a shared parameter has its first name.
        descriptions: which parameters have fused parts.

    Raises:
        LayoutMismatch: the model has a parameter in a form that cannot be stored.

    Attributes:
        units: the model's FSDP1 units.
        clean: returns a name in the model without those of wrappers.
    """

    def __init__(self, model: nn.Module, descriptions: Descriptions = NOT_DESCRIBED) -> None:
        self.units: tuple[FlatUnit, ...] = flat_units(model)
        reshard(model, self.units)
        self._fused = FusedTensors(descriptions)
        self.clean = name_cleaner(model)
        named = list(model.named_parameters())
        for name, parameter in named:
            check_initialized(f"model/{self.clean(name)}", parameter)
        self._names = {id(parameter): self.clean(name) for name, parameter in reversed(named)}
        self._parameters: dict[str, torch.Tensor] = {
            self.clean(name): parameter for name, parameter in named
        }
        self._ranges: dict[int, tuple[HeldRange, ...]] = {
            id(parameter): ranges for unit in self.units for parameter, ranges in unit.holders()
        }

    def all_names(self) -> set[str]:
        """Return the names of all parameters, as the bare model has them."""
        ranges = (held.name for held in itertools.chain(*self._ranges.values()))
        others = (name for held, name in self._names.items() if held not in self._ranges)
        return {*ranges, *others}

    def names(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the parameters that an optimizer's parameter has elements of.

        With FSDP1 these include parameters without elements on this rank.

        Raises:
            LayoutMismatch: the model has no such parameter.
        """
        if id(parameter) in self._ranges:
            return tuple(held.name for held in self._ranges[id(parameter)])
        try:
            return (self._names[id(parameter)],)
        except KeyError:
            raise LayoutMismatch(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model "
                "does not have; make the optimizer after the model is sharded, and pass the model "
                "and the optimizer of the same training state"
            ) from None

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a tensor that is a parameter of the model; None for any other."""
        name = self._names.get(id(tensor))
        return name if name is not None and isinstance(tensor, nn.Parameter) else None

    def named(self, name: str) -> torch.Tensor:
        """Return the parameter of a name.

        Raises:
            LayoutMismatch: the model has no such parameter.
        """
        parameter = self._parameters.get(name)
        if parameter is None:
            raise LayoutMismatch(f"the model has no parameter {name}, which its optimizer had")
        return parameter

    def placed_as(self, tensor: DTensor) -> str | None:
        """Return the name of a parameter of the shape, mesh and placements of a sharded tensor."""
        return next(
            (
                name
                for name, parameter in self._parameters.items()
                if isinstance(parameter, DTensor)
                and parameter.shape == tensor.shape
                and parameter.placements == tensor.placements
                and parameter.device_mesh == tensor.device_mesh
            ),
            None,
        )

    def groups(
        self, optimizers: Iterable[Optimizer]
    ) -> list[tuple[Optimizer, dict[str, Any], list[str]]]:
        """Return the groups of optimizers, each with its optimizer and its parameters' names.

        Raises:
            LayoutMismatch: two optimizers have the same parameter; also as `names` raises.
        """
        groups: list[tuple[Optimizer, dict[str, Any], list[str]]] = []
        owners: dict[str, Optimizer] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                names = [name for parameter in group["params"] for name in self.names(parameter)]
                for name in names:
                    if owners.setdefault(name, optimizer) is not optimizer:
                        raise LayoutMismatch(
                            f"{name} is a parameter of two optimizers, and both would store their "
                            "state of it under the same name; give it to one of them"
                        )
                groups.append((optimizer, group, names))
        return groups

    def shapes(self, parameter: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """Return the unsharded shapes, by name, of the parameters with elements on this rank.

        A rank without elements keeps no slots of a parameter: it does not update them. Raises as
        `names` does.
        """
        if id(parameter) in self._ranges:
            return {held.name: held.shape for held in self._ranges[id(parameter)] if held.count}
        (name,) = self.names(parameter)
        return {name: self._fused.shape(f"model/{name}", parameter)}

    def new_slot(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a slot of zeros, sharded or flattened as the parameter is."""
        like = self._like(parameter)
        if isinstance(like, DTensor):
            return placed_like(like, torch.zeros_like(local_of(like), dtype=dtype))
        if is_made_of_tensors(like):
            return torch.zeros(like.shape, dtype=dtype, device=like.device)
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)

    def new_master(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a slot of the parameter's values, sharded or flattened as the parameter is."""
        return self._like(parameter).detach().to(dtype, copy=True)

    def _like(self, parameter: torch.Tensor) -> torch.Tensor:
        return local_of(parameter).detach() if id(parameter) in self._ranges else parameter

    def describe(self, name: str, tensor: torch.Tensor) -> tuple[LiveTensor, ...]:
        """Return this rank's boxes of a parameter or buffer that belongs to no FSDP1 unit."""
        return self._fused.describe(f"model/{name}", tensor)

    def describe_units(self) -> Iterator[LiveTensor]:
        """Yield this rank's boxes of the parameters of FSDP1 units."""
        for unit in self.units:
            for holder, ranges in unit.holders():
                for held in ranges:
                    yield from held.describe(f"model/{held.name}", holder)

    def describe_slot(
        self, parameter: torch.Tensor, slot: str, tensor: torch.Tensor
    ) -> tuple[LiveTensor, ...]:
        """Return this rank's boxes of an optimizer slot that is a tensor.

        Raises:
            LayoutMismatch: the slot cannot be stored; the message names it.
        """
        shapes = self.shapes(parameter)
        if id(parameter) not in self._ranges:
            ((name, _),) = shapes.items()
            key = f"optim/{name}/{slot}"
            if tensor.shape == parameter.shape:
                return self._fused.describe(key, tensor, parameter=f"model/{name}")
            return self._fused.describe_slot(f"model/{name}", key, parameter, tensor)
        if tensor.numel() == 1 and (slot == "step" or tensor.dim() == 0):
            return tuple(describe(f"optim/{name}/{slot}", tensor) for name in shapes)
        if tensor.shape != local_of(parameter).shape:
            raise LayoutMismatch(
                f"optim/{next(iter(shapes), '')}/{slot}: a slot of shape {tuple(tensor.shape)} of "
                f"a flat parameter of shape {tuple(local_of(parameter).shape)} cannot be stored; "
                "shard the model with fully_shard"
            )
        return tuple(
            live
            for held in self._ranges[id(parameter)]
            if held.count
            for live in held.describe(f"optim/{held.name}/{slot}", tensor)
        )
