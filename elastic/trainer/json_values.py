"""State that is no tensor, as JSON and back: what schedulers and a user's own parts hold.

JSON knows no keys but strings and no infinity, and schedulers have both (`MultiStepLR` counts milestones by number, `ReduceLROnPlateau`
begins at infinity). They are written as `{"$pairs": [[key, value], ...]}` and `{"$float": "inf"}`.
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
    """Return a value as JSON that shares nothing with it. Tuples become lists.

    Raises:
        UsageError: there is something else in it than mappings, sequences, numbers, strings, booleans and None; the message says where.
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
                [to_json_value(f"a key of {name}", k), to_json_value(f"{name}[{k!r}]", v)]
                for k, v in value.items()
            ]
        }
    raise UsageError(
        f"{name} is of type {type(value).__name__}, which cannot be saved; "
        "state_dict() may hold numbers, strings, lists and dictionaries, or only tensors"
    )


def from_json_value(stored: Json, like: Any = None) -> Any:
    """Return what `to_json_value` was given.

    Args:
        stored: its result.
        like: a value of the same kind, such as a fresh object's state: mappings become of its types (`Counter`), and lists tuples
            where it has tuples.
    """
    if isinstance(stored, Mapping):
        if stored.keys() == {_FLOAT}:
            return float(stored[_FLOAT])
        pairs = (
            [[_key(k), v] for k, v in stored[_PAIRS]]
            if stored.keys() == {_PAIRS}
            else stored.items()
        )
        known = like if isinstance(like, Mapping) else {}
        made = {key: from_json_value(item, known.get(key)) for key, item in pairs}
        return type(like)(made) if isinstance(like, dict) and type(like) is not dict else made
    if isinstance(stored, list):
        fresh = (
            like
            if isinstance(like, list | tuple) and len(like) == len(stored)
            else [None] * len(stored)
        )
        items = [from_json_value(item, one) for item, one in zip(stored, fresh, strict=True)]
        return tuple(items) if isinstance(like, tuple) else items
    return stored


def _key(stored: Json) -> Any:
    key = from_json_value(stored)
    # A key that was a tuple came back as a list, which can be none.
    return tuple(key) if isinstance(key, list) else key
