"""Converts state without tensors, as of schedulers and users' objects, to JSON and back.

JSON has only string keys and no infinity, and schedulers use both (`MultiStepLR` has integer keys,
`ReduceLROnPlateau` begins at infinity). Such values are written as
`{"$pairs": [[key, value], ...]}` and `{"$float": "inf"}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from keepstep.checkpoint.layout.boxes import Json
from keepstep.elastic.errors import UsageError

_PAIRS = "$pairs"
_FLOAT = "$float"


def to_json_value(name: str, value: Any) -> Json:
    """Return a copy of a value as JSON. Tuples become lists.

    Args:
        name: what the value is, for the error message.
        value: mappings, lists, tuples, numbers, strings, booleans and None, nested.

    Raises:
        UsageError: the value contains another type; the message names the place.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, list | tuple):
        return [to_json_value(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json_value(f"{name}[{key!r}]", item) for key, item in value.items()}
        return {
            _PAIRS: [
                [to_json_value(f"a key of {name}", key), to_json_value(f"{name}[{key!r}]", item)]
                for key, item in value.items()
            ]
        }
    raise UsageError(
        f"{name} is of type {type(value).__name__}, which cannot be saved; "
        "state_dict() may hold numbers, strings, lists and dictionaries, or only tensors"
    )


def from_json_value(stored: Json, like: Any = None) -> Any:
    """Convert a result of `to_json_value` back to the value.

    Args:
        stored: the JSON value.
        like: a value with the same structure, such as a fresh object's state; mappings get the
            types that it has (`Counter`), and lists become tuples where it has tuples.
    """
    if isinstance(stored, Mapping):
        if stored.keys() == {_FLOAT}:
            return float(stored[_FLOAT])
        pairs = (
            [[_key(key), item] for key, item in stored[_PAIRS]]
            if stored.keys() == {_PAIRS}
            else stored.items()
        )
        like_items = like if isinstance(like, Mapping) else {}
        result = {key: from_json_value(item, like_items.get(key)) for key, item in pairs}
        is_subclass = isinstance(like, dict) and type(like) is not dict
        return type(like)(result) if is_subclass else result
    if isinstance(stored, list):
        is_same_length = isinstance(like, list | tuple) and len(like) == len(stored)
        like_elements = like if is_same_length else [None] * len(stored)
        items = [
            from_json_value(item, like_item)
            for item, like_item in zip(stored, like_elements, strict=True)
        ]
        return tuple(items) if isinstance(like, tuple) else items
    return stored


def _key(stored: Json) -> Any:
    key = from_json_value(stored)
    # A tuple came back as a list, which cannot be a key.
    return tuple(key) if isinstance(key, list) else key
