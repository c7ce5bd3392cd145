"""Implements the command line: `python -m ops.gpu [--json] [--only G4,G7] [--quick]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ops.gpu.check import Check, Result
from ops.gpu.machine import Machine, examine
from ops.gpu.report import count, summary, table
from ops.gpu.runner import TOTAL_LIMIT_S, run_checks

ROOT = Path(__file__).parents[2]
_SLOW = frozenset({"G6", "G10", "G11", "G12", "G13", "G14", "G15", "N4", "N6"})


def main(arguments: Sequence[str], checks: Sequence[Check], machine: Machine | None = None) -> int:
    """Run checks and print their outcomes; return the exit status: 1 if a check failed.

    Args:
        arguments: of the command line.
        checks: all checks.
        machine: the machine; by default it is examined.
    """
    options = _parse(arguments, [check.id for check in checks])
    # Processes of checks import this tree, wherever the command was started.
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([known] if known else [])])
    messages = sys.stderr if options.json else sys.stdout
    chosen = [check for check in checks if _is_chosen(check.id, options)]
    machine = examine() if machine is None else machine

    def announce(check: Check) -> None:
        print(f"{check.id}: {check.shows} ...", file=messages, flush=True)

    outcomes = []
    for outcome in run_checks(chosen, machine, limit_s=options.limit_s, announce=announce):
        outcomes.append(outcome)
        if outcome.result is Result.FAILED:
            print(f"{outcome.id} failed: {outcome.why}\n{outcome.output}", file=messages)
    print(table(machine, outcomes), file=messages, flush=True)
    if options.json:
        print(summary(machine, outcomes))
    return 1 if count(outcomes, Result.FAILED) else 0


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    if options.only:
        return name in options.only
    return not (options.quick and name in _SLOW)


def _parse(arguments: Sequence[str], ids: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout, the rest on stderr"
    )
    parser.add_argument("--only", default="", help="ids of the checks to run, as G4,G7")
    parser.add_argument("--quick", action="store_true", help="leave the slow checks out")
    parser.add_argument(
        "--limit-s", type=float, default=TOTAL_LIMIT_S, help="for all checks together"
    )
    options = parser.parse_args(arguments)
    options.only = {name.strip().upper() for name in options.only.split(",") if name.strip()}
    if unknown := options.only.difference(ids):
        parser.error(f"--only: no check {', '.join(sorted(unknown))}; there are {', '.join(ids)}")
    return options
