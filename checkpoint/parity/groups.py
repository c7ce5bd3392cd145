"""Which nodes protect each other's memory: erasure groups, spread over failure domains.

Pure. Nodes of one rack or switch tend to fail together, so they are dealt to different groups in turn: no way of grouping into as
many groups puts fewer nodes of one domain together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def group_nodes(domains: Sequence[str], size: int, parity: int) -> tuple[int, ...]:
    """Return each node's group, numbered from 0.

    Args:
        domains: each node's failure domain; "" is one of its own.
        size: nodes of a group; groups differ by at most one node, and are larger where a smaller one could not carry the parity.
        parity: losses that each group shall survive.
    """
    count = max(1, min(-(-len(domains) // max(size, 1)), len(domains) // (parity + 1)))
    named = Counter(domain for domain in domains if domain)
    # Whole domains in a row, then dealt in turn: equal neighbours get different groups, and all groups the same number.
    order = sorted(range(len(domains)), key=lambda n: (-named[domains[n]], domains[n], n))
    groups = {node: turn % count for turn, node in enumerate(order)}
    return tuple(groups[node] for node in range(len(domains)))


def worst_loss(domains: Sequence[str], groups: Sequence[int]) -> int:
    """Return how many nodes of one group the loss of one domain takes at most."""
    together = Counter(
        (group, domain or n) for n, (domain, group) in enumerate(zip(domains, groups, strict=True))
    )
    return max(together.values(), default=0)
