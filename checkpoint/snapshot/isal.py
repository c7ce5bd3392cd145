"""Loads ISA-L, the library of the kernels: the copy in pyeclib's wheel, else the system's."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
from functools import cache

from keepstep.checkpoint.errors import CheckpointError


@cache
def isal() -> ctypes.CDLL:
    """Return the library. Its functions do not hold the GIL.

    Raises:
        CheckpointError: it is not installed, or cannot be loaded.
    """
    try:
        files = importlib.metadata.files("pyeclib") or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    bundled = [str(file.locate()) for file in files if file.name.startswith("libisal")]
    path = bundled[0] if bundled else ctypes.util.find_library("isal")
    if path is None:
        raise CheckpointError(
            "ISA-L is not installed: install pyeclib from its wheel, or the package libisal2"
        )
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise CheckpointError(
            f"ISA-L cannot be loaded: {error}; install pyeclib again, or the package libisal2"
        ) from error
    library.gf_mul.restype = library.gf_inv.restype = ctypes.c_ubyte
    library.gf_vect_mul_init.argtypes = [ctypes.c_ubyte, ctypes.c_void_p]
    library.gf_vect_mul.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 3]
    return library
