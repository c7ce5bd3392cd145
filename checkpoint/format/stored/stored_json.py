"""Encodes and parses JSON as it is stored, and checks its numbers. Pure.

Numbers that JSON lacks, such as the loss of a diverged run, are written as objects: NaN and the
infinities become `{"__float__": "NaN"}`, `"Infinity"` and `"-Infinity"`. A mapping of the caller's
that has only this name is put into another one, so that every value comes back as it was. Parsers
of other languages refuse the words that Python writes by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Json

_TAG = "__float__"
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(content: Json) -> bytes:
    """Return JSON as it is stored: UTF-8, compact, keys in the order given.

    Numbers must be finite, as JSON's are; `encode_strict` takes any.
    """
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode(data: bytes, where: str) -> Any:
    """Parse stored JSON.

    Raises:
        CheckpointDamaged: it is not JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not JSON: {error}") from error


def is_count(value: Any) -> bool:
    """Return whether a parsed value is a count: an integer that 63 bits hold, not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def to_strict_json(value: Json) -> Json:
    """Return a value in which all numbers are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return {_TAG: name}
    if isinstance(value, Mapping):
        content = {key: to_strict_json(item) for key, item in value.items()}
        return {_TAG: content} if content.keys() == {_TAG} else content
    if isinstance(value, list | tuple):
        return [to_strict_json(item) for item in value]
    return value


def encode_strict(value: Json) -> bytes:
    """Return what `to_strict_json` returns, encoded.

    Most values are stored as they are; the encoder finds that out sooner than a look at each.
    """
    with suppress(TypeError, ValueError):
        encoded = encode(value)
        if _TAG.encode() not in encoded:
            return encoded
    return encode(to_strict_json(value))


def from_strict_json(value: Json) -> Json:
    """Return the value of which `to_strict_json` returned this."""
    if isinstance(value, dict):
        if value.keys() == {_TAG}:
            content = value[_TAG]
            if isinstance(content, str) and content in _FLOATS:
                return _FLOATS[content]
            value = content if isinstance(content, dict) else value
        return {key: from_strict_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_strict_json(item) for item in value]
    return value
