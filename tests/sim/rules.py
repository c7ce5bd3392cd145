"""Checks rules of the simulator, beyond the invariants that production checks."""

from __future__ import annotations


class BrokenRuleError(AssertionError):
    """A rule of the simulator does not hold."""


def must(holds: bool, rule: str) -> None:
    """Raise `BrokenRuleError` if a rule does not hold."""
    if not holds:
        raise BrokenRuleError(rule)
