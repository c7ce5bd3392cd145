"""Calls the CUDA runtime and driver that PyTorch has loaded, for what it does not offer itself."""

from __future__ import annotations

import ctypes
from pathlib import Path

SUCCESS, NOT_READY, CAPTURE_UNSUPPORTED, ALREADY_REGISTERED = 0, 600, 900, 712
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL = 0, 1


def runtime() -> ctypes.CDLL:
    """Return the CUDA runtime library of this process, whatever its version.

    Raises:
        OSError: none is loaded.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcudart" in path and ".so" in path:
            return ctypes.CDLL(path)
    raise OSError("PyTorch has loaded no libcudart; is it a build for CUDA?")


def set_capture_mode(library: ctypes.CDLL, mode: int) -> None:
    """Set how captures of other threads concern this thread."""
    value = ctypes.c_int(mode)
    code = library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(value))
    if code != SUCCESS:
        raise RuntimeError(f"cudaThreadExchangeStreamCaptureMode: {code}")


def query_event(library: ctypes.CDLL, event: int) -> int:
    """Return the code of cudaEventQuery for an event's handle."""
    return int(library.cudaEventQuery(ctypes.c_void_p(event)))


def has_context(ordinal: int) -> bool:
    """Return whether this process has a primary context on a device; makes none.

    Raises:
        RuntimeError: the driver refuses.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal)
    code = code or driver.cuDevicePrimaryCtxGetState(
        device, ctypes.byref(flags), ctypes.byref(active)
    )
    if code != SUCCESS:
        raise RuntimeError(f"cuDevicePrimaryCtxGetState({ordinal}): {code}")
    return bool(active.value)
