"""Checks that need no GPU: one of each way to end, and functions of ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from ops.gpu.check import Figures, Finding, NotRun
from ops.gpu.machine import Machine
from ops.gpu.ranks import Rank

_LEAVE_ORPHAN = """
import subprocess, sys
orphan = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(sys.argv[1], "w").write(str(orphan.pid))
"""


def hold(machine: Machine) -> Finding:
    return Finding({"it holds": True}, {"gpus": len(machine.gpus)})


def break_claim(machine: Machine) -> Finding:
    return Finding({"it holds": True, "this holds": False}, {"measured": 7})


def raise_error(machine: Machine) -> Finding:
    print("printed before it was raised")
    raise RuntimeError("the device is on fire\nand so on")


def lack_something(machine: Machine) -> Finding:
    raise NotRun("no compiler")


def hang(machine: Machine) -> Finding:
    """Leave an orphan in a session of its own, and never return."""
    written = Path(machine.kernel)
    subprocess.run([sys.executable, "-c", _LEAVE_ORPHAN, str(written)], check=True)
    threading.Event().wait()
    raise AssertionError("nobody sets it")


def meet_and_add(rank: Rank) -> Figures:
    """Add this rank's number to one sum, and read it once all have come."""
    store = rank.store(1)
    store.add("sum", rank.rank + 1)
    rank.meet(store, "added")
    return {"sum": store.add("sum", 0), "option": rank.options["option"]}


def wait_for_nobody(rank: Rank) -> Figures:
    if rank.rank == 0:
        return {}
    threading.Event().wait()
    return {}


def run_out_of_memory(rank: Rank) -> Figures:
    class OutOfMemoryError(RuntimeError):
        """Named as PyTorch's."""

    raise OutOfMemoryError("tried to allocate too much")
