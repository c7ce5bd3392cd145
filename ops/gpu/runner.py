"""Runs checks one after another, each in a process of its own, within its limit.

Whatever a check does, it ends no later than its limit, and nothing of it is left: its descendants
are killed before the next one starts, since they would hold the GPU's memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ops.gpu.check import Check, Outcome, Result
from ops.gpu.keepstep_tree import build_recorder
from ops.gpu.machine import Machine
from ops.gpu.process_tree import adopt_orphans, kill_descendants

TOTAL_LIMIT_S = 590.0
_OUTPUT_CHARACTERS = 8000


def run_checks(
    checks: Sequence[Check],
    machine: Machine,
    *,
    limit_s: float = TOTAL_LIMIT_S,
    announce: Callable[[Check], None] = lambda check: None,
) -> Iterator[Outcome]:
    """Run checks and yield their outcomes, in order. Makes this process adopt orphans.

    Args:
        checks: what to run.
        machine: what they find.
        limit_s: a check that could not end within this time, of all, is not begun.
        announce: called before a check is run.
    """
    adopt_orphans()
    deadline_s = time.monotonic() + limit_s
    is_built = False
    for check in checks:
        reason = reason_not_to_run(check, machine)
        if not reason and check.recorder and not is_built:
            # Before the check's own clock starts.
            build_recorder(limit_s=deadline_s - time.monotonic())
            is_built = True
        if not reason and time.monotonic() + check.limit_s > deadline_s:
            reason = f"the {limit_s:.0f} s for all checks are over; use --only {check.id}"
        if reason:
            yield Outcome(id=check.id, shows=check.shows, result=Result.NOT_RUN, why=reason)
            continue
        announce(check)
        yield run_check(check, machine)


def reason_not_to_run(check: Check, machine: Machine) -> str:
    """Return what the machine lacks for a check; empty if nothing."""
    if machine.missing:
        return machine.missing
    if len(machine.gpus) < check.gpus:
        gpus = len(machine.gpus)
        return f"{gpus} GPU{'s' * (gpus != 1)}, needs {check.gpus}"
    return check.unavailable


def run_check(check: Check, machine: Machine) -> Outcome:
    """Run one check; kill it, and everything it started, at its limit."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="keepstep-gpu-") as name:
        found, log = Path(name) / "finding.json", Path(name) / "output.txt"
        command = [
            sys.executable, "-m", "ops.gpu.check_process",
            check.module, check.function, machine.to_json(), str(found),
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            timed_out = False
            try:
                process.wait(check.limit_s)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                process.kill()
                process.wait()
                remaining = kill_descendants()
        seconds = round(time.monotonic() - began_s, 1)
        text = log.read_text(errors="replace")[-_OUTPUT_CHARACTERS:]
        fields = json.loads(found.read_text()) if found.exists() else {}
    outcome = _judge(check, fields, seconds, process.returncode, timed_out=timed_out)
    if remaining:
        why = f"{outcome.why}; processes {remaining} cannot be killed".removeprefix("; ")
        outcome = replace(outcome, result=Result.FAILED, why=why)
    if outcome.result is Result.FAILED:
        outcome = replace(outcome, output=text)
    return outcome


def _judge(
    check: Check, fields: dict[str, object], seconds: float, status: int, *, timed_out: bool
) -> Outcome:
    claims = fields.get("claims", {})
    figures = fields.get("figures", {})
    assert isinstance(claims, dict)
    assert isinstance(figures, dict)
    broken = [str(claim) for claim, holds in claims.items() if not holds]
    if timed_out:
        result, why = Result.FAILED, f"not done within {check.limit_s:.0f} s"
    elif "not_run" in fields:
        result, why = Result.NOT_RUN, str(fields["not_run"])
    elif "error" in fields:
        result, why = Result.FAILED, str(fields["error"])
    elif not claims:
        result, why = Result.FAILED, f"ended with status {status} before it found anything"
    elif broken:
        result, why = Result.FAILED, "does not hold: " + "; ".join(broken)
    else:
        result, why = Result.PASSED, ""
    return Outcome(
        id=check.id,
        shows=check.shows,
        result=result,
        why=why,
        seconds=seconds,
        claims=claims,
        figures=figures,
    )
