"""Runs a program as a recorded worker, without setting an environment variable.

Usage: `python -m keepstep.monitor.run script.py [arguments]`, or `-m module [arguments]`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from keepstep.monitor.telemetry.attachment import attach


def main() -> None:
    """Attach the recorder, then run the program as `__main__`."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    program = arguments[is_module:]
    if not program:
        sys.exit("usage: python -m keepstep.monitor.run (script.py | -m module) [arguments]")
    attach()
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        directory = str(Path(program[0]).resolve().parent)
        if sys.flags.safe_path:
            sys.path.insert(0, directory)
        else:
            sys.path[0] = directory
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
