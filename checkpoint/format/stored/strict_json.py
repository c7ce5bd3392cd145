"""Writes numbers that JSON lacks, such as the loss of a diverged run, as objects. Pure.

NaN and the infinities become `{"__float__": "NaN"}`, `"Infinity"` and `"-Infinity"`. A mapping of
the caller's that has only this name is put into another one, so that every value comes back as it
was. Parsers of other languages refuse the words that Python writes by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.stored.stored_json import encode

_TAG = "__float__"
_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
