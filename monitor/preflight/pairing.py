"""Schedules which doctors measure each other when, and finds the nodes that stand out. Pure.

All pairs of n nodes are measured in n - 1 rounds (n of them if n is odd), each node in at most one
pair a round: the circle method of round-robin tournaments (Kirkman, 1847). So all links are
measured in O(n) time, and no two measurements share a network card.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MIN_NODES = 3
"""With two nodes it is unknown whether one is slow or the other one fast."""
SIGMAS = 6.0
"""Deviations in multiples of the noise among the others: normal noise exceeds 6 once in 10^9."""
_NORMAL = 1.4826
"""Times the median absolute deviation it is the standard deviation, where noise is normal."""
_FEW = 32
"""Number of nodes up to which each is compared with the others without it."""
_APART = 4.0
"""A node that is this many times worse than the worst of the others stands out, however noisy."""
_MIN_NOISE = 0.02
"""As a share of the median: nodes that agree more closely by chance make no outlier of a third one
that is 3 % off."""


def rounds(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the rounds in which `count` participants meet, each pair once, as (lower, higher)."""
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
    """A node that stands out.

    Args:
        name: the node.
        value: its value.
        median: of the nodes that it is held against.
        sigmas: how far it is from the median, in standard deviations of those nodes.
    """

    name: str
    value: float
    median: float
    sigmas: float


def outliers(
    values: Mapping[str, float], min_share: float, *, low_is_bad: bool
) -> tuple[Outlier, ...]:
    """Return the nodes whose value is bad compared with the others', the worst first.

    Args:
        values: one for each node; fewer than three decide nothing.
        min_share: how far from the median a value must be at least, as a share of the median.
        low_is_bad: the values are rates, rather than times.
    """
    if len(values) < MIN_NODES:
        return ()
    of_all = _median_and_noise(list(values.values()))
    standing_out = []
    for name, value in values.items():
        others: list[float] = []
        if len(values) <= _FEW:
            others = [other for peer, other in values.items() if peer != name]
        # Among few, one that is far off spoils the median and the noise that it is held against.
        median, noise = _median_and_noise(others) if others else of_all
        excess = median - value if low_is_bad else value - median
        is_beyond_noise = excess > SIGMAS * noise and excess > min_share * abs(median)
        if is_beyond_noise or _is_apart(value, others, low_is_bad=low_is_bad):
            standing_out.append(Outlier(name, value, median, excess / noise))
    return tuple(sorted(standing_out, key=lambda outlier: -outlier.sigmas))


def best_rates(rates: Iterable[tuple[str, float]], nodes: Iterable[str]) -> dict[str, float]:
    """Return the best rate of every node's links: a sick node is slow with all of them.

    Args:
        rates: a node of each link, and the link's rate.
        nodes: the nodes to return.
    """
    all_nodes = frozenset(nodes)
    best: dict[str, float] = {}
    for node, rate in rates:
        if node in all_nodes:
            best[node] = max(rate, best.get(node, 0.0))
    return best


def _is_apart(value: float, others: Sequence[float], *, low_is_bad: bool) -> bool:
    """Whether a value is far behind the last of the others, however much these scatter."""
    if not others:
        return False
    return value * _APART < min(others) if low_is_bad else value > max(others) * _APART


def _median_and_noise(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the standard deviation, from the median absolute deviation.

    The deviation is never quite zero.
    """
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values) * _NORMAL
    return median, max(deviation, _MIN_NOISE * abs(median), 1e-300)
