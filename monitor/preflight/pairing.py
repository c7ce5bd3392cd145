"""Who meets whom when, and who stands out: the two pure ideas of the doctor.

All pairs of n nodes meet in n - 1 rounds (n of them if n is odd), everybody in at most one pair a round: the circle method
of round-robin tournaments (Kirkman, 1847). So links are measured all to all in O(n) time without two measurements sharing a
network card.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_NODES = 3
"""With two, who is slow and who is fast is a matter of taste."""
SIGMAS = 6.0
"""Deviations in multiples of the noise among the others: normal noise exceeds 6 once in 10^9."""
_NORMAL = 1.4826
"""Times the median absolute deviation it is the standard deviation, where noise is normal."""
_FEW = 32
_APART = 4.0
_FLOOR = 0.02
"""Nodes that agree more closely than this by chance do not make a third that is 3 % off an outlier."""


def rounds(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the rounds in which `count` participants meet pairwise, each pair once and as (lower, higher)."""
    if count < 2:
        return ()
    circle = list(range(count)) + ([-1] if count % 2 else [])
    half = len(circle) // 2
    scheduled = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        scheduled.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair)))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(scheduled)


@dataclass(frozen=True, slots=True)
class Outlier:
    """Who stands out, with what value, against which median, by how many standard deviations of the others."""

    name: str
    value: float
    median: float
    sigmas: float


def outliers(
    values: Mapping[str, float], least_share: float, *, low_is_bad: bool
) -> tuple[Outlier, ...]:
    """Return those whose value is bad against the others', the worst first.

    Args:
        values: one each; fewer than three decide nothing.
        least_share: how far from the median it must be at least, as a share of it.
        low_is_bad: rates, rather than times.
    """
    if len(values) < LEAST_NODES:
        return ()
    usual = _usual(list(values.values()))
    found = []
    for name, value in values.items():
        others = (
            [other for peer, other in values.items() if peer != name] if len(values) <= _FEW else []
        )
        # Among few, one that is far off spoils the median and the noise that it is held against.
        median, noise = _usual(others) if others else usual
        excess = median - value if low_is_bad else value - median
        is_beyond = excess > SIGMAS * noise and excess > least_share * abs(median)
        # Where the others scatter so much that this says nothing, one that is far behind the last of them still is.
        is_apart = bool(others) and (
            value * _APART < min(others) if low_is_bad else value > max(others) * _APART
        )
        if is_beyond or is_apart:
            found.append(Outlier(name, value, median, excess / noise))
    return tuple(sorted(found, key=lambda one: -one.sigmas))


def _usual(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the standard deviation as the median absolute deviation tells it; never quite zero."""
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values) * _NORMAL
    return median, max(spread, _FLOOR * abs(median), 1e-300)


def best_of(
    links: Mapping[tuple[str, str], float], names: Sequence[str], side: int
) -> dict[str, float]:
    """Return for every node the best rate of its links, as sender (`side` 0) or receiver (1): a sick node is slow with everybody."""
    best: dict[str, float] = {}
    for pair, rate in links.items():
        if pair[side] in names:
            best[pair[side]] = max(rate, best.get(pair[side], 0.0))
    return best
