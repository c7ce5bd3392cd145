"""Converts state of schedulers, data loaders and users' objects to JSON and back.

JSON has only string keys and no infinity, and schedulers use both (`MultiStepLR` has integer keys,
`ReduceLROnPlateau` begins at infinity). Such values are written as
`{"$pairs": [[key, value], ...]}` and `{"$float": "inf"}`; tuples, bytes, and the small tensors and
arrays in which data loaders keep their generators' states, as `{"$tuple": [...]}`,
`{"$bytes": BASE64}`, and `{"$tensor": [type, shape, BASE64]}` or `{"$array": ...}`.
"""

from __future__ import annotations

import base64
import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.names import is_text
from keepstep.elastic.errors import UsageError

_PAIRS = "$pairs"
_FLOAT = "$float"
_TUPLE = "$tuple"
_BYTES = "$bytes"
_TENSOR = "$tensor"
_ARRAY = "$array"

_KINDS = frozenset({_FLOAT, _TUPLE, _BYTES, _TENSOR, _ARRAY})

_MOST_NBYTES = 1 << 20


def to_json_value(name: str, value: Any) -> Json:
    """Return a copy of a value as JSON.

    Args:
        name: what the value is, for the error message.
        value: mappings, lists, tuples, numbers, strings, bytes, booleans and None, nested; and
            tensors on the CPU and NumPy's arrays and scalars, up to 1 MiB each.

    Raises:
        UsageError: the value contains another type, or a larger tensor; the message names the
            place.
    """
    if isinstance(value, str) and not is_text(value):
        raise UsageError(
            f"{name} is {value!a}, which cannot be saved: it has half of a surrogate pair"
        )
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, list | tuple):
        items = [to_json_value(f"{name}[{i}]", item) for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") and is_text(key) for key in value):
            return {key: to_json_value(f"{name}[{key!r}]", item) for key, item in value.items()}
        return {
            _PAIRS: [
                [to_json_value(f"a key of {name}", key), to_json_value(f"{name}[{key!r}]", item)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return to_json_value(name, value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: [value.dtype.str, list(value.shape), _encode(name, value)]}
    if isinstance(value, torch.Tensor) and _has_elements(value):
        dtype = str(value.dtype).removeprefix("torch.")
        # One element counts as contiguous with any stride, and then is not viewed as bytes.
        copied = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
        flat = copied.reshape(-1).view(torch.uint8).numpy()
        return {_TENSOR: [dtype, list(value.shape), _encode(name, flat)]}
    raise UsageError(
        f"{name} is of type {type(value).__name__}, which cannot be saved; "
        "state_dict() may hold numbers, strings, lists and dictionaries, or only tensors"
    )


def _has_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie in the CPU's memory as its strides say."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _encode(name: str, array: np.ndarray[Any, Any]) -> str:
    if array.nbytes > _MOST_NBYTES:
        raise UsageError(
            f"{name} has {array.nbytes} bytes, too many among values that are no tensors; "
            "state_dict() may hold small tensors among other values, or only tensors"
        )
    return base64.b64encode(array.tobytes()).decode()


def from_json_value(stored: Json, like: Any = None) -> Any:
    """Convert a result of `to_json_value` back to the value.

    Args:
        stored: the JSON value.
        like: a value with the same structure, such as a fresh object's state; mappings and lists
            get the types that it has (`Counter`), lists become tuples where it has tuples, and
            tuples get the names of its fields. Values of a `defaultdict` are like the ones that it
            makes.
    """
    if isinstance(stored, Mapping):
        kind = next(iter(stored), None)
        if kind in _KINDS and len(stored) == 1:
            return _decode(kind, stored[kind], like)
        pairs = (
            [[_key(key), item] for key, item in stored[_PAIRS]]
            if stored.keys() == {_PAIRS}
            else stored.items()
        )
        result = {key: from_json_value(item, _like_item(like, key, item)) for key, item in pairs}
        return _as_dict(like, result) if isinstance(like, dict) else result
    if isinstance(stored, list):
        is_same_length = isinstance(like, list | tuple) and len(like) == len(stored)
        like_elements = like if is_same_length else [None] * len(stored)
        items = [
            from_json_value(item, like_item)
            for item, like_item in zip(stored, like_elements, strict=True)
        ]
        if isinstance(like, tuple):
            return _as_tuple(like, items)
        return _as_list(like, items) if isinstance(like, list) else items
    return stored


def _like_item(like: Any, key: Any, stored: Json) -> Any:
    """Return the model for an item of a mapping; only items that hold others need one."""
    if isinstance(like, defaultdict) and key not in like and isinstance(stored, Mapping | list):
        return None if like.default_factory is None else like.default_factory()
    return like.get(key) if isinstance(like, Mapping) else None


def _as_dict(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return the items in a copy of another object, since each class has its own constructor."""
    if type(like) is dict:
        return items
    result = copy.copy(like)
    result.clear()
    result.update(items)
    return result


def _as_list(like: list[Any], items: list[Any]) -> list[Any]:
    if type(like) is list:
        return items
    result = copy.copy(like)
    result[:] = items
    return result


def _as_tuple(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    has_names = hasattr(like, "_fields") and len(like) == len(items)
    return type(like)._make(items) if has_names else tuple(items)  # type: ignore[attr-defined]


def _decode(kind: str, content: Json, like: Any) -> Any:
    if kind == _FLOAT:
        return float(content)
    if kind == _TUPLE:
        return _as_tuple(like if isinstance(like, tuple) else (), from_json_value(content, like))
    if kind == _BYTES:
        return base64.b64decode(content)
    dtype, shape, encoded = content
    raw = np.frombuffer(bytearray(base64.b64decode(encoded)), np.uint8)
    if kind == _ARRAY:
        return raw.view(np.dtype(dtype)).reshape(shape)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)


def _key(stored: Json) -> Any:
    key = from_json_value(stored)
    # A tuple came back as a list, which cannot be a key.
    return tuple(key) if isinstance(key, list) else key
