"""From ranks to subjects: what holds of all ranks of a node is the node's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from monitor.verdicts import Subject


def rank_subject(rank: int, nodes: Mapping[int, str]) -> Subject:
    """Return one rank as a subject."""
    return Subject("rank", (rank,), nodes.get(rank, ""))


def node_subject(node: str, nodes: Mapping[int, str]) -> Subject:
    """Return a node with all its ranks."""
    return Subject("node", tuple(sorted(rank for rank, where in nodes.items() if where == node)), node)


def group_subject(ranks: Iterable[int], nodes: Mapping[int, str]) -> Subject:
    """Return ranks of which it is not known which; a single one is a rank."""
    members = tuple(sorted(ranks))
    if len(members) == 1:
        return rank_subject(members[0], nodes)
    where = {nodes.get(rank, "") for rank in members}
    return Subject("group", members, where.pop() if len(where) == 1 else "")


def link_subject(sender: int, receiver: int, nodes: Mapping[int, str]) -> Subject:
    """Return the link from one rank to another."""
    where = {nodes.get(sender, ""), nodes.get(receiver, "")}
    return Subject("link", (sender, receiver), where.pop() if len(where) == 1 else "")


def gather(ranks: Iterable[int], nodes: Mapping[int, str]) -> tuple[Subject, ...]:
    """Return the ranks' subjects: a node for all ranks of one that has several, else one for each rank."""
    by_node: dict[str, list[int]] = defaultdict(list)
    alone: list[Subject] = []
    for rank in ranks:
        by_node[nodes.get(rank, "")].append(rank)
    for node, members in by_node.items():
        if node and len(members) > 1 and len(members) == sum(where == node for where in nodes.values()):
            alone.append(node_subject(node, nodes))
        else:
            alone.extend(rank_subject(rank, nodes) for rank in members)
    return tuple(sorted(alone, key=lambda subject: subject.ranks))
