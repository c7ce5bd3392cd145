"""Finds out whether keepstep, of this tree, can be used here, and runs its commands.

On a machine where nothing can be installed its dependencies may be missing; then checks that need
it are not run, and say what is missing.
"""

from __future__ import annotations

import subprocess
import sys

from ops.gpu.check import NotRun

RECORDER_MODULES = (
    "keepstep.monitor.telemetry.attachment",
    "keepstep.monitor.telemetry.ring_reader",
)
"""Modules that `recorded_process` imports; more than the packages' front modules load."""

_IMPORT_LIMIT_S = 120.0
_BUILD_LIMIT_S = 180.0
_FIND_LIMIT_S = 20.0


def require(*modules: str) -> None:
    """Raise NotRun unless modules of keepstep can be imported, in a process of their own."""
    code = f"import {', '.join(modules)}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=_IMPORT_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise NotRun(f"keepstep cannot be imported: {_last_line(done.stderr)}")


def build_recorder(limit_s: float) -> None:
    """Build the recorder's library if it does not exist; its user reports why that failed.

    Args:
        limit_s: after this time the build is abandoned, and after three minutes in any case.
    """
    try:
        recorder_library(limit_s=max(1.0, min(limit_s, _BUILD_LIMIT_S)))
    except NotRun:
        return


def recorder_library(limit_s: float = _FIND_LIMIT_S) -> str:
    """Return the path of the recorder's library; build it first if it does not exist.

    Raises:
        NotRun: it cannot be built here, as without a compiler.
    """
    command = [sys.executable, "-m", "keepstep.monitor.telemetry.native"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NotRun(f"the recorder is not built within {limit_s:.0f} s; try again") from None
    if done.returncode:
        raise NotRun(f"the recorder cannot be built: {_last_line(done.stderr)}")
    return done.stdout.splitlines()[-1]


def _last_line(text: str) -> str:
    return (text.strip() or "no output").splitlines()[-1]
