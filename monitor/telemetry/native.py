"""Builds and loads the native recorder of operations (the sources in the folder `native`).

It records an operation without the GIL, in about a microsecond. The machine's C++ compiler builds
it against the headers of the installed PyTorch: 15 seconds, once for each version of PyTorch and
of these sources, on each machine or shared home. `python -m keepstep.monitor.telemetry.native`
builds it ahead of time, for images whose workers have no compiler; the library must then lie at
`library_path()`.

The library is a profiler plugin of NCCL as well (see `native/nccl_profiler.cpp`): NCCL reports the
kernels of operations to it if NCCL_PROFILER_PLUGIN names it when a communicator is created.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

import torch

from keepstep.monitor.errors import RecorderUnavailable
from keepstep.monitor.telemetry.ring import STEP_OFFSET, Ring

SOURCES = Path(__file__).with_name("native")
PLUGIN_VARIABLE = "NCCL_PROFILER_PLUGIN"

_BUILD_TIMEOUT_S = 600
_LONGEST_PLUGIN_PATH = 254
"""Bytes of the path that NCCL keeps."""

Describe = Callable[[str, int, int], tuple[int, Sequence[int]]]
"""(name, rank in the group, size) of a process group -> (identity, global ranks)."""

_DESCRIBE = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_int32),
)


class NativeRecorder:
    """The loaded library, one in a process.

    Loading it registers its kernels with PyTorch; they do nothing until `open`.
    """

    def __init__(self) -> None:
        """Load the library; build it first if it does not exist yet.

        Raises:
            RecorderUnavailable: there is no compiler, or it fails.
        """
        path = build()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise RecorderUnavailable(
                f"{path} cannot be loaded: {error}. Remove it, and it is built again."
            ) from error
        self._library.keepstep_open.argtypes = [ctypes.c_char_p, *[ctypes.c_size_t] * 5, _DESCRIBE]
        # The library may call this: a reference must be kept as long.
        self._describe = _DESCRIBE()

    def open(self, ring: Ring, describe: Describe) -> None:
        """Record operations into a ring from now on, numbered from 1 in each communicator.

        Raises:
            RecorderUnavailable: the ring cannot be opened.
        """

        def fill_description(
            name: bytes,
            rank: int,
            size: int,
            identity: ctypes._Pointer[ctypes.c_uint32],
            ranks: object,
        ) -> None:
            identity[0], members = describe(name.decode(errors="replace"), rank, size)
            array = (ctypes.c_int32 * size)(*members)
            ctypes.memmove(ranks, array, 4 * size)  # type: ignore[arg-type]

        callback = _DESCRIBE(fill_description)
        lane = ring.sizes.regions[0]
        error = self._library.keepstep_open(
            os.fsencode(ring.path),
            ring.sizes.nbytes,
            lane.offset,
            lane.capacity,
            lane.counter_offset,
            STEP_OFFSET,
            callback,
        )
        if error:
            raise RecorderUnavailable(
                f"{ring.path} cannot be opened for the native recorder: {os.strerror(error)}"
            )
        self._describe = callback

    def close(self) -> None:
        """Stop recording; the records of open operations are still completed."""
        self._library.keepstep_close()

    def calls_inside(self) -> int:
        """Return how many threads are inside a call of a back end, to launch or to wait."""
        return int(self._library.keepstep_calls_inside())

    def set_coalescing(self, is_coalescing: bool) -> None:
        """Tell whether this thread is in a block whose operations are launched at its end."""
        self._library.keepstep_set_coalescing(int(is_coalescing))


def library_path() -> Path:
    """Return the path of the library for this PyTorch and this source, built or not.

    It lies below KEEPSTEP_CACHE_DIR, else below `keepstep` in XDG_CACHE_HOME or ~/.cache.
    """
    sources = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        sources.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    digest = sources.hexdigest()[:12]
    configured = os.environ.get("KEEPSTEP_CACHE_DIR")
    base = (
        Path(configured)
        if configured
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepstep"
    )
    return base / f"operations-{digest}-torch-{torch.__version__}.so"


def name_as_nccl_plugin(environment: MutableMapping[str, str]) -> bool:
    """Have NCCL report its launches to the library; return whether it will.

    It does so for communicators that are created later. A plugin that the user named stays, and one
    that another version of this library left to a child process does not.

    Args:
        environment: of this process, as NCCL will read it.
    """
    path = library_path()
    named = environment.get(PLUGIN_VARIABLE)
    if named is not None and Path(named).parent != path.parent:
        return False
    if len(os.fsencode(path)) > _LONGEST_PLUGIN_PATH:
        return False
    environment[PLUGIN_VARIABLE] = str(path)
    return True


def build() -> Path:
    """Build the library unless it exists; return its path.

    Processes that start together wait for the first one to build it.

    Raises:
        RecorderUnavailable: there is no compiler, or it fails; the directory cannot be written, or
            other users could have written there.
    """
    path = library_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(path.parent)
        if not path.exists():
            _build(path)
        _refuse_foreign(path)
    except OSError as error:
        raise RecorderUnavailable(
            f"{path} cannot be built: {error}. Set KEEPSTEP_CACHE_DIR."
        ) from error
    return path


def _build(path: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path.with_suffix(".lock"), flags, 0o600), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            _compile(unfinished)
            # Whatever the user's umask is.
            unfinished.chmod(0o755)
            os.rename(unfinished, path)


def _refuse_foreign(path: Path) -> None:
    """Raise if another user could have written the library, which runs in this process."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise RecorderUnavailable(
            f"{path} belongs to or can be written by other users (owner {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}). Remove it, or set KEEPSTEP_CACHE_DIR to a "
            "directory of your own."
        )


def _compile(target: Path) -> None:
    compiler = (
        os.environ.get("CXX")
        or shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    if not compiler:
        raise RecorderUnavailable(
            "operations are not recorded: there is no C++ compiler here to build the recorder. "
            "Install g++, or build it on a machine with a compiler and the same PyTorch "
            "(python -m keepstep.monitor.telemetry.native), and copy the library to "
            f"{target.parent}."
        )
    include, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    command = [
        *compiler.split(), "-std=c++20", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread",
        "-o", str(target), *map(str, sorted(SOURCES.glob("*.cpp"))),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        # PyTorch's own headers are not free of warnings.
        "-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include"),
        f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ldl",
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
        lines = done.stderr.splitlines()
        error_lines = [line for line in lines if "error" in line] or lines
        raise RecorderUnavailable(
            "operations are not recorded; the recorder cannot be built: "
            + " | ".join(error_lines[:5])
        )


if __name__ == "__main__":
    print(build())
