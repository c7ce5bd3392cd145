"""Shows the outcome of a campaign: as one JSON object, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ops.bench.chaos.campaign import Outcome


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return all seeds' outcomes, and their sums."""
    seeds = [outcome.summary() for outcome in outcomes]
    judgements = [outcome.judgement for outcome in outcomes if outcome.judgement is not None]
    return {
        "seeds": seeds,
        "lost_samples": sum(judgement.lost_samples for judgement in judgements),
        "repeated_samples": sum(judgement.repeated_samples for judgement in judgements),
        "leftovers": sum(len(outcome.leftovers) for outcome in outcomes),
        "failed": sum(outcome.failed for outcome in outcomes),
    }


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row for each seed."""
    columns = Table(title="faults survived")
    names = ("seed", "minutes", "faults", "recoveries", "recovery_s", "lost_samples",
             "repeated_samples", "loss_equal", "leftovers", "unexplained")  # fmt: skip
    for name in names:
        columns.add_column(name)
    for outcome in outcomes:
        summary: dict[str, Any] = outcome.summary()
        summary["faults"] = sum(summary["faults"].values())
        summary["unexplained"] = len(summary["unexplained"])
        columns.add_row(*(str(summary[name]) for name in names))
    return columns
