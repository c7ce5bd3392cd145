"""Writes tensors and small objects inside an optimizer's values as JSON, and reads them.

A tensor is stored with the slots of a parameter; one in an optimizer's group is stored within the
JSON. An object is stored as its attributes if its class belongs to the optimizer's package. Reading
it runs no code of the class, and imports none.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.encoded_values import SLOT, TENSOR, Decoder, encode_value
from keepstep.checkpoint.live.model_parameters import ModelParameters
from keepstep.checkpoint.live.storable import check_storable, is_made_of_tensors
from keepstep.checkpoint.live.tensors import bytes_of, dtype_name, local_of, torch_dtype

_DTYPE = "$dtype"
_SIZE = "$size"
_PARAMETER = "$parameter"
_OBJECT = "$object"
_SUBCLASS = "$subclass"
_OWN_STATE = frozenset({"__slots__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"})
"""Methods of classes whose objects are not simply their attributes."""

_MOST_NBYTES = 1 << 20


class SlotEncoder:
    """Encodes a value that an optimizer keeps, whose tensors are stored as slots of a parameter.

    Args:
        key: the parameter's and the slot's names, as `<name>/<slot>`.
        parameters: names the parameters.
        parameter: the optimizer's parameter.
        optimizer: the optimizer.

    Attributes:
        tensors: the tensors found, by the names of the slots that they become.
    """

    def __init__(
        self,
        key: str,
        parameters: ModelParameters,
        parameter: torch.Tensor,
        optimizer: Optimizer,
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._key = key
        self._slot = key.rpartition("/")[2]
        self._parameters = parameters
        self._on_accelerator = parameter.device.type != "cpu"
        self._package = _package_of(type(optimizer))

    def encode(self, value: object) -> Json:
        """Return a value as JSON.

        Raises:
            LayoutMismatch: something in it cannot be stored; the message names the place.
        """
        return encode_value(f"optim/{self._key}", value, self._other)

    def encode_tensor(self, tensor: torch.Tensor) -> Json:
        """Return the annotation of a slot that is a tensor whose elements lie in another order."""
        return {SLOT: {"name": self._slot, "strides": list(tensor.stride())}}

    def _other(self, name: str, value: object) -> Json:
        if not isinstance(value, torch.Tensor):
            return _named_of_torch(value) or self._object(name, value)
        parameter = self._parameters.name_of(value)
        if parameter is not None:
            return {_PARAMETER: parameter}
        if self.divides(value):
            inner, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
            return {
                _SUBCLASS: {
                    "class": f"{type(value).__module__}:{type(value).__qualname__}",
                    "tensors": {
                        each: self._other(f"{name}.{each}", getattr(value, each)) for each in inner
                    },
                    "context": encode_value(f"{name}: its context", context, self._other),
                    "shape": list(value.shape),
                    "strides": list(value.stride()),
                }
            }
        check_storable(name, local_of(value))
        slot = f"{self._slot}.{len(self.tensors)}"
        self.tensors[slot] = value
        noted: dict[str, Json] = {"name": slot}
        if isinstance(value, DTensor):
            like = self._parameters.placed_as(value)
            if like is None:
                raise LayoutMismatch(
                    f"{name}: a DTensor of shape {tuple(value.shape)} that is sharded as no "
                    "parameter of this shape cannot be stored"
                )
            noted["like"] = like
        elif not value.is_contiguous():
            noted["strides"] = list(value.stride())
        if self._on_accelerator and value.device.type == "cpu":
            noted["device"] = "cpu"
        return {SLOT: noted}

    def divides(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is stored as the tensors that make it up."""
        return is_made_of_tensors(tensor) and _is_of_package(type(tensor), self._package)

    def _object(self, name: str, value: object) -> Json:
        kind = type(value)
        if not _is_plain_class(kind, self._package):
            return None
        attributes = encode_value(name, dict(vars(value)), self._other)
        return {
            _OBJECT: {"class": f"{kind.__module__}:{kind.__qualname__}", "attributes": attributes}
        }


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_of_package(kind: type, package: str) -> bool:
    """Return whether a class belongs to a package other than Python's own and PyTorch."""
    return (
        package not in ("torch", "builtins")
        and "." not in kind.__qualname__
        and _package_of(kind) == package
    )


def _is_plain_class(kind: type, package: str) -> bool:
    """Return whether a class belongs to a package and its objects are simply their attributes."""
    classes = kind.__mro__[:-1]
    return (
        _is_of_package(kind, package)
        and all(_package_of(each) == package for each in classes)
        and not any(vars(each).keys() & _OWN_STATE for each in classes)
    )


def has_other_strides(slot: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the elements of a slot lie otherwise than in a new slot.

    The order decides how a product of matrices is rounded.
    """
    if isinstance(slot, DTensor) or slot.is_contiguous() or slot.shape != parameter.shape:
        return not isinstance(slot, DTensor) and not slot.is_contiguous()
    return slot.stride() != parameter.stride()


def new_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, noted: Mapping[str, Json]
) -> torch.Tensor:
    """Return a tensor of zeros for a slot that an encoder has annotated.

    Strides that are wrong, or leave much memory unused, are not kept.
    """
    strides = noted.get("strides")
    if (
        not isinstance(strides, list)
        or len(strides) != len(shape)
        or not all(isinstance(stride, int) and stride > 0 for stride in strides)
        or not math.prod(shape)
    ):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if not math.prod(shape) <= extent <= 4 * math.prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.zeros(extent, dtype=dtype, device=device).as_strided(tuple(shape), strides)


def slot_decoder(
    slots: Mapping[str, torch.Tensor],
    parameter_named: Callable[[str], torch.Tensor],
    optimizer: Optimizer,
) -> Decoder:
    """Return a decoder for the values of a `SlotEncoder`.

    Args:
        slots: the tensors, by the names of the slots that they were stored as.
        parameter_named: returns the parameter of a name.
        optimizer: the optimizer, whose package objects may be of.
    """
    package = _package_of(type(optimizer))

    def other(kind: str, content: Json) -> Any:
        if kind == SLOT:
            try:
                tensor = slots[content["name"]]
            except KeyError:
                raise LayoutMismatch(
                    f"the optimizer's tensor {content['name']} is missing in the source"
                ) from None
            return tensor.cpu() if content.get("device") == "cpu" else tensor
        if kind == _PARAMETER:
            return parameter_named(content)
        if kind == _SUBCLASS:
            return _wrapped(content, decoder, package)
        if kind == _OBJECT:
            return _made(content["class"], decoder.decode(content["attributes"]), package)
        return _of_torch(kind, content)

    decoder = Decoder(other)
    return decoder


def _wrapped(content: Mapping[str, Json], decoder: Decoder, package: str) -> Any:
    """Return a tensor of a class that its package has imported, made of others."""
    module, _, name = content["class"].partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    if (
        not isinstance(kind, type)
        or not issubclass(kind, torch.Tensor)
        or not hasattr(kind, "__tensor_unflatten__")
        or not _is_of_package(kind, package)
    ):
        raise LayoutMismatch(
            f"the optimizer's state has a tensor of {content['class']!r:.100}, which is no such "
            f"class of {package}; use the release of it that the checkpoint was saved with"
        )
    return kind.__tensor_unflatten__(
        decoder.decode(content["tensors"]),
        decoder.decode(content["context"]),
        torch.Size(content["shape"]),
        tuple(content["strides"]),
    )


def _made(named: str, attributes: Mapping[str, Any], package: str) -> Any:
    """Return an object of a class that its package has imported, with these attributes."""
    module, _, name = named.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type) or not _is_plain_class(kind, package):
        raise LayoutMismatch(
            f"the optimizer's state has an object of {named!r:.100}, which is no plain class of "
            f"{package}; use the release of it that the checkpoint was saved with"
        )
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def encode_option(name: str, value: object, parameter: torch.Tensor | None) -> Json:
    """Return a hyperparameter as JSON, with the tensors in it.

    Args:
        name: the hyperparameter's name, for the error message.
        value: the value.
        parameter: one of the group's parameters, if it has any.

    Raises:
        LayoutMismatch: something in it cannot be stored, or is a tensor of more than 1 MiB.
    """
    on_accelerator = parameter is not None and parameter.device.type != "cpu"

    def other(name: str, value: object) -> Json:
        if not isinstance(value, torch.Tensor):
            return _named_of_torch(value)
        if isinstance(value, DTensor) or value.numel() * value.element_size() > _MOST_NBYTES:
            raise LayoutMismatch(
                f"{name}: a {'sharded tensor' if isinstance(value, DTensor) else 'tensor'} of "
                f"shape {tuple(value.shape)} among the options of an optimizer's group cannot be "
                "stored; tensors of up to 1 MiB can"
            )
        check_storable(name, value)
        noted: dict[str, Json] = {
            "dtype": dtype_name(value.dtype),
            "shape": list(value.shape),
            "data": base64.b64encode(bytes_of(value.detach()).numpy().tobytes()).decode(),
        }
        if on_accelerator and value.device.type == "cpu":
            noted["device"] = "cpu"
        return {TENSOR: noted}

    return encode_value(f"optimizer value {name!r}", value, other)


def option_decoder(device: torch.device) -> Decoder:
    """Return a decoder for hyperparameters, which puts their tensors on a device."""

    def other(kind: str, content: Json) -> Any:
        if kind != TENSOR:
            return _of_torch(kind, content)
        data = bytearray(base64.b64decode(content["data"]))
        dtype = torch_dtype(content["dtype"])
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        tensor = flat.view(dtype) if data else torch.empty(0, dtype=dtype)
        on_cpu = content.get("device") == "cpu"
        return tensor.reshape(content["shape"]).to("cpu" if on_cpu else device)

    return Decoder(other)


def _named_of_torch(value: object) -> Json:
    if isinstance(value, torch.Size):
        return {_SIZE: list(value)}
    return {_DTYPE: dtype_name(value)} if isinstance(value, torch.dtype) else None


def _of_torch(kind: str, content: Json) -> Any:
    if kind == _DTYPE:
        return torch_dtype(content)
    if kind == _SIZE:
        return torch.Size(content)
    raise LayoutMismatch(
        f"the optimizer's state has {kind!r:.40}, which this release does not know"
    )
