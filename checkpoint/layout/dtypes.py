"""Zarr v3 data type names and their NumPy counterparts.

ml_dtypes supplies the NumPy types that NumPy itself lacks. The torch counterparts are in
`keepstep.checkpoint.live.tensors`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_NUMPY: dict[str, np.dtype] = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
} | {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
}  # fmt: skip


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of a Zarr data type name.

    Raises:
        ValueError: the format does not store this data type.
    """
    try:
        return _NUMPY[name]
    except KeyError:
        raise ValueError(
            f"data type {name!r} cannot be stored; known are {', '.join(_NUMPY)}"
        ) from None
