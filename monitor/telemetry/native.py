"""Builds and loads the native recorder of operations (`operations.cpp`), which records without the GIL, in about a microsecond.

It is built against the PyTorch that is installed, whose headers come with it, by the machine's C++ compiler: ten seconds, once for each
version of PyTorch and of this source, on each machine or shared home. `python -m keepstep.monitor.telemetry.native` builds it ahead of time, for images
whose workers have no compiler; then it needs to be found where `library_path` says.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from keepstep.monitor.errors import RecorderUnavailable
from keepstep.monitor.telemetry.ring import STEP_OFFSET, Ring

_SOURCE = Path(__file__).with_name("operations.cpp")
_BUILD_TIMEOUT_S = 600

Describe = Callable[[str, int, int], tuple[int, Sequence[int]]]
"""(name, rank in the group, size) of a process group -> (identity, global ranks)."""

_DESCRIBE = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_int32)
)  # fmt: skip


class NativeRecorder:
    """The loaded library. One a process: its kernels are registered with PyTorch when it is loaded, and do nothing until `open`."""

    def __init__(self) -> None:
        """Load the library; build it first if that was not yet done.

        Raises:
            RecorderUnavailable: there is no compiler, or it fails.
        """
        path = build()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise RecorderUnavailable(
                f"{path} cannot be loaded: {error}. Remove it, and it is built anew."
            ) from error
        self._library.keepstep_open.argtypes = [ctypes.c_char_p, *[ctypes.c_size_t] * 5, _DESCRIBE]
        # ctypes must keep what the library may call.
        self._describe = _DESCRIBE()

    def open(self, ring: Ring, describe: Describe) -> None:
        """Record operations into a ring from now on, with all communicators' numbers from 1."""

        def told(
            name: bytes,
            rank: int,
            size: int,
            identity: ctypes._Pointer[ctypes.c_uint32],
            ranks: object,
        ) -> None:
            found, members = describe(name.decode(errors="replace"), rank, size)
            identity[0] = found
            ctypes.memmove(ranks, (ctypes.c_int32 * size)(*members), 4 * size)  # type: ignore[arg-type]

        called = _DESCRIBE(told)
        lane = ring.sizes.regions[0]
        error = self._library.keepstep_open(
            os.fsencode(ring.path), ring.sizes.nbytes, lane.offset, lane.capacity, lane.counter_offset, STEP_OFFSET, called
        )  # fmt: skip
        if error:
            raise RecorderUnavailable(
                f"{ring.path} cannot be opened for the native recorder: {os.strerror(error)}"
            )
        self._describe = called

    def close(self) -> None:
        """Stop recording; operations under way are completed all the same."""
        self._library.keepstep_close()


def library_path() -> Path:
    """Return where the library for this PyTorch and this source is, or will be.

    Below KEEPSTEP_CACHE_DIR, else below `keepstep` in XDG_CACHE_HOME or ~/.cache.
    """
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    own = os.environ.get("KEEPSTEP_CACHE_DIR")
    base = (
        Path(own)
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepstep"
    )
    return base / f"operations-{digest}-torch-{torch.__version__}.so"


def build() -> Path:
    """Build the library unless it is there; return its path. Processes that start together wait for the first.

    Raises:
        RecorderUnavailable: there is no compiler, or it fails, or the directory cannot be written.
    """
    path = library_path()
    if path.exists():
        return _own(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = path.with_suffix(f".{os.getpid()}")
                _compile(unfinished)
                os.rename(unfinished, path)
    except OSError as error:
        raise RecorderUnavailable(
            f"{path} cannot be built: {error}. Set KEEPSTEP_CACHE_DIR."
        ) from error
    return _own(path)


def _own(path: Path) -> Path:
    """Refuse what another user could have put there: it would run in this process."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise RecorderUnavailable(
            f"{path} belongs to or can be written by others. Remove it, or set KEEPSTEP_CACHE_DIR."
        )
    return path


def _compile(target: Path) -> None:
    compiler = (
        os.environ.get("CXX")
        or shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    if not compiler:
        raise RecorderUnavailable(
            "operations are not recorded: there is no C++ compiler here to build the recorder. Install g++, or build where "
            f"there is one, with the same PyTorch (python -m keepstep.monitor.telemetry.native), and copy the library to {target.parent}."
        )
    include, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    command = [
        *compiler.split(), "-std=c++20", "-O2", "-shared", "-fPIC", "-o", str(target), str(_SOURCE),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{libraries}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RecorderUnavailable(
            f"building the recorder took longer than {_BUILD_TIMEOUT_S} s"
        ) from error
    if done.returncode:
        complaints = [
            line for line in done.stderr.splitlines() if "error" in line
        ] or done.stderr.splitlines()
        raise RecorderUnavailable(
            "operations are not recorded; the recorder cannot be built: "
            + " | ".join(complaints[:5])
        )


if __name__ == "__main__":
    print(build())
