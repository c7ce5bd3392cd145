"""JSON that a type decodes: numbers, text and containers of the kinds that its fields have."""

from __future__ import annotations

import collections.abc
import enum
import types
import typing
from random import Random
from typing import Any

_MOST_DEPTH = 6


def sample(kind: Any, random: Random, depth: int = 0) -> Any:
    """Return a value that a field of a type may have, as JSON has it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated or str(origin) == "typing.Required":
        return sample(arguments[0], random, depth)
    if origin in (typing.Union, types.UnionType):
        if depth > _MOST_DEPTH and type(None) in arguments:
            return None
        return sample(random.choice(arguments), random, depth)
    if origin is typing.Literal:
        return random.choice(arguments)
    if origin is not None and isinstance(origin, type):
        return _of_container(origin, arguments, random, depth)
    if kind in (None, type(None)):
        return None
    if not isinstance(kind, type):
        return 1
    if issubclass(kind, enum.Enum):
        return random.choice(list(kind)).value
    if issubclass(kind, bool):
        return random.random() < 0.5
    for number, value in ((int, random.choice((0, 1, 3, 200))), (float, 1.5), (str, "a")):
        if issubclass(kind, number):
            return value
    if issubclass(kind, bytes):
        return "YQ=="
    hints = _fields(kind)
    return {name: sample(hint, random, depth + 1) for name, hint in hints.items()} or None


def _of_container(origin: type, arguments: Any, random: Random, depth: int) -> Any:
    if issubclass(origin, collections.abc.Mapping):
        return {"a": sample(arguments[1], random, depth + 1)}
    if issubclass(origin, tuple) and arguments[-1:] != (Ellipsis,):
        return [sample(argument, random, depth + 1) for argument in arguments]
    count = 0 if depth > _MOST_DEPTH else random.choice((0, 1, 2))
    return [sample(arguments[0], random, depth + 1) for _ in range(count)]


def _fields(kind: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):
        return {}
    return {
        name: hint
        for name, hint in hints.items()
        if typing.get_origin(hint) is not typing.ClassVar and not name.startswith("_")
    }
