"""Writes values of an optimizer that are no plain numbers as JSON, and reads them back.

JSON has lists and mappings by text alone. Other containers are objects with one member whose name
begins with `$`: `{"$tuple": [...]}`, `{"$pairs": [[key, value], ...]}` for mappings by other keys,
and so on (FORMAT.md lists them). A tensor inside is `{"$slot": {"name": ...}}`, which is stored as
a tensor of this name with the parameter's other slots, or `{"$tensor": {"dtype": ..., "shape": ...,
"data": BASE64}}`.

Pure, and without torch: the caller recognizes tensors and encodes them.
"""

from __future__ import annotations

import base64
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.names import is_text

_TUPLE = "$tuple"
_PAIRS = "$pairs"
_ORDERED = "$ordered"
_DEQUE = "$deque"
_SET = "$set"
_BYTES = "$bytes"
SLOT = "$slot"
TENSOR = "$tensor"

_MOST_DEPTH = 100


def encode_value(name: str, value: object, encode_other: Callable[[str, object], Json]) -> Json:
    """Return a copy of a value as JSON.

    Args:
        name: of the value, for the error message.
        value: mappings, lists, tuples, sets, deques, numbers, text, bytes and None, nested.
        encode_other: returns any other object in it as JSON, such as a tensor, given its name.
            Returns None for an unknown object.

    Raises:
        LayoutMismatch: something in it cannot be stored; the message names the place.
    """
    return _encode(name, value, encode_other, 0)


def _encode(
    name: str, value: object, encode_other: Callable[[str, object], Json], depth: int
) -> Json:
    if depth > _MOST_DEPTH:
        raise LayoutMismatch(f"{name} contains itself, or is nested more than {_MOST_DEPTH} deep")
    if isinstance(value, str) and not is_text(value):
        raise LayoutMismatch(f"{name}: {value!a} cannot be stored: it has half of a surrogate pair")
    if value is None or isinstance(value, bool | int | float | str):
        return value

    def items(values: Any) -> list[Json]:
        return [
            _encode(f"{name}[{number}]", item, encode_other, depth + 1)
            for number, item in enumerate(values)
        ]

    if type(value) is list:
        return items(value)
    if type(value) is tuple:
        return {_TUPLE: items(value)}
    if type(value) is deque:
        return {_DEQUE: {"items": items(value), "maxlen": value.maxlen}}
    if type(value) in (set, frozenset):
        return {_SET: items(sorted(value))}  # type: ignore[call-overload]
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if type(value) in (dict, OrderedDict):
        assert isinstance(value, dict)
        if type(value) is dict and all(
            isinstance(key, str) and not key.startswith("$") and is_text(key) for key in value
        ):
            return {
                key: _encode(f"{name}[{key!r}]", item, encode_other, depth + 1)
                for key, item in value.items()
            }
        pairs = [
            [
                _encode(f"a key of {name}", key, encode_other, depth + 1),
                _encode(f"{name}[{key!r:.60}]", item, encode_other, depth + 1),
            ]
            for key, item in value.items()
        ]
        return {_PAIRS if type(value) is dict else _ORDERED: pairs}
    encoded = encode_other(name, value)
    if encoded is None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise LayoutMismatch(
            f"{name}: a value of type {kind} cannot be stored; only numbers, text, tensors and "
            "plain containers of them can"
        )
    return encoded


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes results of `encode_value`.

    Attributes:
        decode_other: returns the object that `encode_other` encoded, given the member's name, such
            as `$slot`, and its content.
    """

    decode_other: Callable[[str, Json], Any]

    def decode(self, encoded: Json) -> Any:
        """Return the value that `encode_value` encoded.

        Raises:
            LayoutMismatch: it is no result of `encode_value`.
        """
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, Mapping):
            return encoded
        kind = next(iter(encoded), "")
        if len(encoded) != 1 or not kind.startswith("$"):
            return {key: self.decode(item) for key, item in encoded.items()}
        content = encoded[kind]
        match kind:
            case "$tuple":
                return tuple(self.decode(item) for item in content)
            case "$pairs":
                return {self.decode(key): self.decode(item) for key, item in content}
            case "$ordered":
                return OrderedDict((self.decode(key), self.decode(item)) for key, item in content)
            case "$deque":
                return deque(map(self.decode, content["items"]), content["maxlen"])
            case "$set":
                return {self.decode(item) for item in content}
            case "$bytes":
                return base64.b64decode(content)
        return self.decode_other(kind, content)


def noted_slots(values: Mapping[str, Json]) -> dict[str, Mapping[str, Json]]:
    """Return the annotations of tensors inside encoded values, by the tensors' names."""
    return {noted["name"]: noted for value in values.values() for noted in slots_within(value)}


def slots_within(encoded: Json) -> Iterator[Mapping[str, Json]]:
    """Yield the annotation of each tensor that is stored with the parameter's other slots."""
    if isinstance(encoded, list):
        for item in encoded:
            yield from slots_within(item)
    elif isinstance(encoded, Mapping):
        if encoded.keys() == {SLOT}:
            yield encoded[SLOT]
        else:
            for item in encoded.values():
                yield from slots_within(item)
