"""Turns values of pickles into JSON: numbers, text and containers of them, as documents have.

Objects that are only attributes, such as `argparse.Namespace`, become mappings; tensors of one
element, such as a learning rate, become numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keepstep.checkpoint.convert.read.arrays import GAP_NBYTES, FileArray, MemoryArray
from keepstep.checkpoint.convert.read.pickled_values import Global, NumpyArray, NumpyType, Record
from keepstep.checkpoint.convert.read.zip_checksums import check_extent
from keepstep.checkpoint.format.layout.boxes import Json

_MOST_DEPTH = 64
_SHOWN = 80


class NotJson(Exception):
    """A value has no counterpart in JSON; the message says which part of it."""


def as_json(value: object, depth: int = 0) -> Json:
    """Return a value as JSON.

    Raises:
        NotJson: JSON has nothing for it.
        CheckpointError: the bytes of a number in it cannot be read.
    """
    if depth > _MOST_DEPTH:
        raise NotJson(f"it is nested more than {_MOST_DEPTH} deep")
    match value:
        case None | bool() | float() | str():
            return value
        case int():
            if value.bit_length() > 1024:
                raise NotJson("it is an integer of more than 1024 bits")
            return value
        case dict():
            return {_key(key): as_json(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [as_json(item, depth + 1) for item in value]
        case set() | frozenset():
            return [as_json(item, depth + 1) for item in sorted(value, key=repr)]
        case FileArray(size=1) | MemoryArray(values=np.ndarray(size=1)):
            number = number_of(value)
            if not isinstance(number, complex):
                return number
        case Global(name=name) if name.startswith("torch.") and name.count(".") == 1:
            # A data type, layout or memory format.
            return name
        case Record(name="argparse.Namespace" | "types.SimpleNamespace"):
            return as_json(dict(value.attributes), depth + 1)
        case Record(name=name, args=(str() as first, *others)) if name.startswith(
            "pathlib."
        ) and all(isinstance(other, str) for other in others):
            return "/".join([first.rstrip("/"), *others]) if others else first
    raise NotJson(f"it has {described(value)}, which JSON has not")


def number_of(array: FileArray | MemoryArray) -> bool | int | float | complex:
    """Return the only element of an array.

    Raises:
        CheckpointDamaged: its bytes do not match their checksum.
        CheckpointError: its bytes cannot be read.
    """
    if isinstance(array, FileArray) and array.extent.nbytes <= GAP_NBYTES:
        # Else it is one of many elements, each of which would take as long.
        check_extent(array.extent, lambda nbytes: None)
    values = array.read() if isinstance(array, FileArray) else array.values
    number: Any = np.asarray(values).reshape(()).item()
    # ml_dtypes' types have scalars of their own.
    return number if isinstance(number, bool | int | float | complex) else float(number)


def described(value: object) -> str:
    """Return in words what a value is, for the reasons of what is left out."""
    match value:
        case Record(name=name):
            return f"an object of {name[:_SHOWN]}"
        case Global(name=name):
            return f"the name {name[:_SHOWN]}"
        case FileArray() | MemoryArray():
            return f"a tensor of {value.dtype} {value.shape}"
        case NumpyArray() | NumpyType():
            return "a NumPy array or type"
    return f"a value of type {type(value).__name__}"


def _key(key: object) -> str:
    if isinstance(key, str):
        return key
    # As text it would be another key to whoever looks for the number.
    raise NotJson(f"it has {described(key)} as a key, which JSON has not")
