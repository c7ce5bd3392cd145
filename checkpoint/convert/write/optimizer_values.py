"""Replaces encoded values of optimizers by what other tools' formats have for them. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.encoded_values import SLOT, TENSOR, Decoder


def only_notes(slot: str, value: Json) -> bool:
    """Return whether a value only notes how the elements of the tensor of this slot lay."""
    return isinstance(value, Mapping) and value.keys() == {SLOT} and value[SLOT].get("name") == slot


def has_object(value: Json) -> bool:
    """Return whether an encoded value has an object of a class, or a parameter."""
    if isinstance(value, list):
        return any(map(has_object, value))
    if not isinstance(value, Mapping):
        return False
    return not value.keys().isdisjoint(("$object", "$parameter")) or any(
        map(has_object, value.values())
    )


def plain_options(options: Mapping[str, Json]) -> dict[str, Any]:
    """Return hyperparameters with tensors of one element, such as a learning rate, as numbers."""

    def other(kind: str, content: Json) -> Any:
        if kind == TENSOR and math.prod(content["shape"]) == 1:
            values = np.frombuffer(base64.b64decode(content["data"]), numpy_dtype(content["dtype"]))
            number: Any = values[0].item()
            return number if isinstance(number, bool | int | float) else float(number)
        return {kind: content}

    decoder = Decoder(other)
    return {name: decoder.decode(value) for name, value in options.items()}
