"""Loads ISA-L, the library that computes parity: the copy in pyeclib's wheel, else the system's.

pyeclib is a dependency for this copy alone. Its wheel has had the file `libisal*` since 1.7;
installed from source it has none, and the system's package takes its place.
"""

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
            "ISA-L, which computes parity, is not installed: install pyeclib from its wheel "
            "(`pip install --only-binary :all: pyeclib`) or the system's package libisal2, or run "
            "without parity (`keepstep run --parity 0`)"
        )
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise CheckpointError(
            f"ISA-L cannot be loaded: {error}; install pyeclib again, or the system's package "
            "libisal2"
        ) from error
    library.gf_mul.restype = library.gf_inv.restype = ctypes.c_ubyte
    library.gf_vect_mul_init.argtypes = [ctypes.c_ubyte, ctypes.c_void_p]
    library.gf_vect_mul.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 3]
    return library
