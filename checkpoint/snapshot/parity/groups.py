"""Assigns nodes to erasure groups, which protect each other's memory, across failure domains.

Pure. Nodes of one rack or switch tend to fail together, so the nodes of a domain go to different
groups in turn: no other assignment to as many groups puts fewer nodes of one domain together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from keepstep.checkpoint.format.layout.integers import ceil_div


def group_nodes(domains: Sequence[str], size: int, parity: int) -> tuple[int, ...]:
    """Return each node's group, numbered from 0.

    Args:
        domains: each node's failure domain; "" means that the node fails on its own.
        size: the wanted number of nodes in a group. Sizes differ by at most one node; groups are
            larger where smaller ones could not hold the parity.
        parity: number of lost nodes that each group must survive.
    """
    nodes = len(domains)
    count = max(1, min(ceil_div(nodes, max(size, 1)), nodes // (parity + 1)))
    domain_sizes = Counter(domain for domain in domains if domain)
    # Nodes ordered by domain are assigned to the groups in turn: nodes of one domain get different
    # groups, and all groups get the same number of nodes.
    order = sorted(range(nodes), key=lambda n: (-domain_sizes[domains[n]], domains[n], n))
    groups = {node: turn % count for turn, node in enumerate(order)}
    return tuple(groups[node] for node in range(nodes))
