"""Rebuilds tensors of torch in pickles as views of the storages that they name.

Pure. A tensor that is not plain strided elements of a data type that keepstep stores (sparse,
quantized, conjugated lazily) stays a `Record`; a sharded one is a `Record` too, named by its class,
whose arguments or state have the local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.files import Extent, damaged
from keepstep.checkpoint.convert.read.pickled_values import (
    Constructor,
    Global,
    Record,
    plain_constructors,
)
from keepstep.checkpoint.convert.read.safe_repr import safe_repr
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype

UNTYPED = "torch.storage.UntypedStorage"

_DTYPES_OF_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
# Names that torch has for the same data types.
_ALIASES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
_ITEMSIZES_ELSEWHERE = {
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
    "QInt32Storage": 4,
    "ComplexHalfStorage": 4,
}


@dataclass(frozen=True, slots=True)
class StorageKind:
    """The class of a storage: bytes of an element, and its data type, if keepstep stores it."""

    itemsize: int
    dtype: str | None


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A storage of torch: the bytes that tensors are views of."""

    extent: Extent
    kind: StorageKind

    def __setstate__(self, state: object) -> None:
        # A pickle refers to a storage, and cannot change it.
        pass


def storage_kind(value: object) -> StorageKind:
    """Return the kind of a storage that a persistent id names.

    Raises:
        ValueError: torch has no such storage.
    """
    name = value.name if isinstance(value, Global) else ""
    leaf = name.rpartition(".")[2]
    if name == UNTYPED:
        return StorageKind(1, None)
    if name.startswith("torch.") and leaf in _DTYPES_OF_STORAGES:
        dtype = _DTYPES_OF_STORAGES[leaf]
        return StorageKind(numpy_dtype(dtype).itemsize, dtype)
    if name.startswith("torch.") and leaf in _ITEMSIZES_ELSEWHERE:
        return StorageKind(_ITEMSIZES_ELSEWHERE[leaf], None)
    raise ValueError(f"{name or safe_repr(value)} is no storage that is known"[:200])


def dtype_name(value: object) -> str | None:
    """Return the name of a data type of torch, or None if the value is none that is stored."""
    if not isinstance(value, Global) or not value.name.startswith("torch."):
        return None
    name = value.name.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    try:
        numpy_dtype(name)
    except ValueError:
        return None
    return name


def torch_constructors() -> dict[str, Constructor]:
    """Return what builds plain containers and tensors, by the names in pickles."""
    return {
        **plain_constructors(),
        "torch._utils._rebuild_tensor": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": _rebuild_tensor_of_untyped,
        "torch._utils._rebuild_parameter": _rebuild_parameter,
        "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
        "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
        "torch._tensor._rebuild_from_type": _rebuild_from_type,
    }


def _rebuild_tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object = False,
    hooks: object = None,
    metadata: object = None,
) -> object:
    kind = storage.kind if isinstance(storage, PickledStorage) else None
    if kind is None or kind.dtype is None or metadata:
        args = (storage, offset, shape, strides, requires_grad, hooks, metadata)
        return Record("torch._utils._rebuild_tensor_v2", args)
    return _view(storage, kind.dtype, offset, shape, strides)


def _rebuild_tensor_of_untyped(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    name = dtype_name(dtype)
    if name is None or metadata:
        args = (storage, offset, shape, strides, requires_grad, hooks, dtype, metadata)
        return Record("torch._utils._rebuild_tensor_v3", args)
    return _view(storage, name, offset, shape, strides)


def _view(storage: object, dtype: str, offset: object, shape: object, strides: object) -> FileArray:
    if (
        not isinstance(storage, PickledStorage)
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or type(offset) is not int
    ):
        raise ValueError("a tensor is rebuilt from other values than a storage, numbers and tuples")
    return FileArray(storage.extent, dtype, shape, strides, offset)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _rebuild_from_type(
    function: object, kind: object, args: object = (), state: object = None
) -> object:
    """Return a tensor with attributes as that tensor, an instance of a subclass as a `Record`."""
    if not isinstance(function, Global) or not isinstance(args, tuple):
        raise ValueError("a tensor is rebuilt by what is no function")
    kind_name = kind.name if isinstance(kind, Global) else ""
    rebuild = _PLAIN.get(function.name)
    if rebuild is not None and kind_name in _PLAIN_CLASSES:
        return rebuild(*args)
    return Record(kind_name or function.name, args, state=state)


_PLAIN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_of_untyped,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
}
_PLAIN_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def storage_of_id(value: object) -> tuple[StorageKind, str, int]:
    """Return the kind, the key and the number of elements of a storage that a pickle refers to.

    Raises:
        ValueError: the persistent id is not what `torch.save` writes.
    """
    if (
        not isinstance(value, tuple)
        or len(value) < 5
        or value[0] != "storage"
        or not isinstance(value[2], str)
        or type(value[4]) is not int
        or value[4] < 0
    ):
        raise ValueError("a persistent id does not describe a storage")
    return storage_kind(value[1]), value[2], value[4]


def sized_extent(extent: Extent, kind: StorageKind, count: int) -> PickledStorage:
    """Return a storage, once its bytes are as many as its elements need.

    Raises:
        CheckpointDamaged: they are not.
    """
    if count * kind.itemsize != extent.nbytes:
        raise damaged(
            extent.location,
            f"a storage of {count} elements of {kind.itemsize} bytes has {extent.nbytes} bytes",
        )
    return PickledStorage(extent, kind)
