"""Computes with integer sizes, exactly where floating-point division is not. Pure."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up: how many pieces of `divisor` elements cover `dividend`."""
    return -(-dividend // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `number`."""
    return ceil_div(number, multiple) * multiple
