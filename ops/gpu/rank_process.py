"""Runs one rank of a check: `python -m ops.gpu.rank_process MODULE FUNCTION RANK FILE`.

It ends at once when the function has returned: aborted groups may keep a process from ending. If it
crashes it prints the stacks of its threads; and if it gets SHOW_STACKS, where Python is.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from ops.gpu.ranks import SHOW_STACKS, Rank


def main(module: str, function: str, rank: str, file: str) -> None:
    """Call the function, and write what it returned to the file."""
    target = Path(file)
    status = 0
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    # Of C++, after those of Python.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    try:
        figures = getattr(importlib.import_module(module), function)(Rank.from_json(rank))
        found: dict[str, Any] = {"figures": dict(figures)}
    except Exception as error:  # noqa: BLE001 - the failure is the rank's result
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        found, status = {"error": f"{type(error).__name__}: {first_line}"}, 1
    unfinished = target.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found))
    unfinished.rename(target)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
