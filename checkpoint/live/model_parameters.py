"""Names of a model's parameters, and what an optimizer's parameter and its slots are of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.layout.boxes import Json
from keepstep.checkpoint.live.flat_parameters import (
    FlatUnit,
    HeldRange,
    flat_units,
    without_wrappers,
)
from keepstep.checkpoint.live.part_slices import FusedTensors
from keepstep.checkpoint.live.tensors import LiveTensor, describe, local_of

NOT_FUSED = FusedTensors()


class ModelParameters:
    """The parameters of a model, by the identity of what optimizers hold.

    Nearly always an optimizer holds a parameter of the model. With FSDP1 it holds a flat piece of
    one, or a flat piece of many one after the other.

    Args:
        model: names the parameters; a shared parameter has its first name.
        fused: which parameters have fused parts.

    Raises:
        LayoutMismatch: the model has a parameter in a form that cannot be stored.

    Attributes:
        units: the model's FSDP1 units.
    """

    def __init__(self, model: nn.Module, fused: FusedTensors = NOT_FUSED) -> None:
        self.units: tuple[FlatUnit, ...] = flat_units(model)
        self._fused = fused
        self._names = {
            id(parameter): without_wrappers(name) if self.units else name
            for name, parameter in reversed(list(model.named_parameters()))
        }
        self._ranges: dict[int, tuple[HeldRange, ...]] = {
            id(parameter): ranges for unit in self.units for parameter, ranges in unit.holders()
        }

    def names(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the names of the parameters that an optimizer's parameter has elements of.

        With FSDP1 these are also the names of those of which this rank has no elements.

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

    def shapes(self, parameter: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """Return the unsharded shapes, by name, of the parameters that this rank has elements of.

        A rank without elements keeps no slots of a parameter: it does not update them. Raises as
        `names` does.
        """
        if id(parameter) in self._ranges:
            return {held.name: held.shape for held in self._ranges[id(parameter)] if held.count}
        (name,) = self.names(parameter)
        return {name: self._fused.shape(name, parameter)}

    def new_slot(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a slot of zeros, sharded or flattened as the parameter is."""
        like = local_of(parameter).detach() if id(parameter) in self._ranges else parameter
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)

    def describe(self, name: str, tensor: torch.Tensor) -> tuple[LiveTensor, ...]:
        """Return this rank's boxes of a parameter or buffer that belongs to no FSDP1 unit."""
        return self._fused.describe(name, f"model/{name}", tensor)

    def part_tables(self, names: Iterable[str]) -> dict[str, Json]:
        """Return the fused parts of those of these parameters that have any, as JSON by name."""
        return self._fused.document(names)

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
                return self._fused.describe(name, key, tensor)
            return (describe(key, tensor),)
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
