"""Renders outcomes as a table for people and as one JSON object for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from ops.gpu.check import Outcome, Result
from ops.gpu.machine import Machine

_WIDTH = 100
_INDENT = " " * 14


def table(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """Return the machine, and for each check its id, its result, what it shows, why and figures."""
    gpus = ", ".join(machine.gpus) or machine.missing
    lines = [
        f"torch {machine.torch or '-'}, CUDA {machine.cuda or '-'}, NCCL {machine.nccl or '-'}, "
        f"Python {machine.python}, {machine.cores} cores; {gpus}",
        "",
        f"{'id':<5}{'result':<9}what it shows",
    ]
    for outcome in outcomes:
        lines.append(f"{outcome.id:<5}{outcome.result.value:<9}{outcome.shows}")
        details = ((outcome.why, "why"), (_written(outcome), "figures"))
        for text, title in details:
            if text:
                lines += _wrapped(f"{title}: {text}")
    counts = ", ".join(f"{count(outcomes, result)} {result.value}" for result in Result)
    return "\n".join([*lines, "", counts])


def summary(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """Return the JSON object."""
    return json.dumps(
        {
            "machine": asdict(machine),
            "passed": count(outcomes, Result.PASSED),
            "failed": count(outcomes, Result.FAILED),
            "not_run": count(outcomes, Result.NOT_RUN),
            "checks": [asdict(outcome) for outcome in outcomes],
        }
    )


def count(outcomes: Sequence[Outcome], result: Result) -> int:
    """Return how many checks ended so."""
    return sum(outcome.result is result for outcome in outcomes)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT + "  ",
        break_on_hyphens=False,
    )


def _written(outcome: Outcome) -> str:
    figures = [f"{name} {value}" for name, value in outcome.figures.items()]
    if outcome.seconds:
        figures.append(f"took {outcome.seconds} s")
    return ", ".join(figures)
