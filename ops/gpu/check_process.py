"""Runs one check: `python -m ops.gpu.check_process MODULE FUNCTION MACHINE FILE`.

Writes what it found to the file, as JSON: claims and figures, why it was not run, or the error. It
then ends at once: what an abort left behind may keep a process from ending by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ops.gpu.check import Finding, NotRun
from ops.gpu.machine import Machine


def main(module: str, function: str, machine: str, file: str) -> None:
    """Run the check, and write what it found."""
    target = Path(file)
    try:
        check = getattr(importlib.import_module(module), function)
        finding = check(Machine.from_json(machine))
        assert isinstance(finding, Finding)
        assert finding.claims, f"{module}.{function} claims nothing"
        found: dict[str, Any] = {
            "claims": dict(finding.claims),
            "figures": dict(finding.figures),
        }
    except NotRun as reason:
        found = {"not_run": str(reason)}
    except Exception as error:  # noqa: BLE001 - the failure is the check's result
        traceback.print_exc()
        found = failure(error)
    unfinished = target.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found))
    unfinished.rename(target)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def failure(error: Exception) -> dict[str, str]:
    """Return what to report of an exception; too little memory is no failure of the check."""
    first_line = (str(error).splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first_line}"
    return {"not_run" if type(error).__name__ == "OutOfMemoryError" else "error": text}


if __name__ == "__main__":
    main(*sys.argv[1:])
