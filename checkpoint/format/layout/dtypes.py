"""Maps names of data types to their counterparts in Zarr v3 and NumPy.

The names are Zarr's, core and registered extensions, which are also torch's. Types of torch that
Zarr lacks keep torch's name and are stored as another type, which Zarr has. ml_dtypes supplies the
NumPy types that NumPy itself lacks. The torch counterparts are in
`keepstep.checkpoint.live.tensors`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

# An element of torch's type is a byte that holds two values; Zarr's `float4_e2m1fn` is one value.
_STORED_AS = {"float4_e2m1fn_x2": "uint8"}

_NUMPY: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
} | {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
} | {name: np.dtype(stored) for name, stored in _STORED_AS.items()}  # fmt: skip


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a data type name; a dtype of bytes if NumPy has none.

    Raises:
        ValueError: the format does not store this data type.
    """
    try:
        return _NUMPY[name]
    except KeyError:
        raise ValueError(
            f"data type {name!r} cannot be stored; known are {', '.join(_NUMPY)}"
        ) from None


def zarr_data_type(name: str) -> str:
    """Return the Zarr v3 name of the data type as which a data type is stored: mostly itself."""
    return _STORED_AS.get(name, name)


def is_convertible(source: str, target: str) -> bool:
    """Return whether values of a data type have a counterpart in another one, except for rounding.

    A float may be rounded to another float. An imaginary part, a fraction, or an integer outside
    the target's range would be lost silently.
    """
    if source == target:
        return True
    if not (is_in_zarr(source) and is_in_zarr(target)):
        return False
    kinds = [_kind(source), _kind(target)]
    if kinds == ["integer", "integer"]:
        return np.can_cast(_NUMPY[source], _NUMPY[target], "safe")
    return _KINDS.index(kinds[0]) <= _KINDS.index(kinds[1])


_KINDS = ("bool", "integer", "float", "complex")


def _kind(name: str) -> str:
    return {"b": "bool", "i": "integer", "u": "integer", "c": "complex"}.get(
        _NUMPY[name].kind, "float"
    )


def is_in_zarr(name: str) -> bool:
    """Return whether Zarr has the data type itself; torch converts no other to another type."""
    return name not in _STORED_AS
