"""From ranks to subjects: what holds of all ranks of a node is the node's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict


def rank_subject(rank: int, nodes: Mapping[int, str]) -> Subject:
    """Return one rank as a subject."""
    return Subject("rank", (rank,), nodes.get(rank, ""))


def node_subject(node: str, nodes: Mapping[int, str]) -> Subject:
    """Return a node with all its ranks."""
    return Subject(
        "node", tuple(sorted(rank for rank, where in nodes.items() if where == node)), node
    )


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
        if (
            node
            and len(members) > 1
            and len(members) == sum(where == node for where in nodes.values())
        ):
            alone.append(node_subject(node, nodes))
        else:
            alone.extend(rank_subject(rank, nodes) for rank in members)
    return tuple(sorted(alone, key=lambda subject: subject.ranks))


def with_job_nodes(verdicts: Iterable[Verdict], places: Mapping[int, str]) -> tuple[Verdict, ...]:
    """Return the verdicts with each rank's node as `places` has it; what holds of all ranks of a member is the member's."""
    return _merge_per_node(
        [replace(verdict, subject=_with_job_node(verdict.subject, places)) for verdict in verdicts],
        places,
    )


def begun_since(began_s: float, verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts whose trouble began after the job did, by the same clock: rings of an earlier run may still lie there."""
    return tuple(verdict for verdict in verdicts if verdict.since_s >= began_s)


def _merge_per_node(verdicts: Sequence[Verdict], places: Mapping[int, str]) -> tuple[Verdict, ...]:
    """Return one verdict of a node instead of those of all its ranks, if it has several and they stand still all alike."""
    alike: dict[tuple[str, Syndrome], list[Verdict]] = defaultdict(list)
    others = []
    for verdict in verdicts:
        if (
            verdict.subject.kind == "rank"
            and verdict.subject.node
            and verdict.advice is Advice.RESTART_WORKER
        ):
            alike[verdict.subject.node, verdict.syndrome].append(verdict)
        else:
            others.append(verdict)
    for (node, _), parts in alike.items():
        everyone = tuple(sorted(rank for rank, where in places.items() if where == node))
        if len(parts) < 2 or sorted(rank for part in parts for rank in part.subject.ranks) != list(
            everyone
        ):
            others += parts
            continue
        whole = replace(
            parts[0],
            subject=Subject("node", everyone, node),
            since_s=min(part.since_s for part in parts),
            evidence=tuple(line for part in parts[:4] for line in part.evidence[:2]),
            confidence=min(part.confidence for part in parts),
            cost_s_per_step=max(part.cost_s_per_step for part in parts),
            advice=Advice.REPLACE_NODE,
        )
        others.append(whole)
    return tuple(others)


def _with_job_node(subject: Subject, places: Mapping[int, str]) -> Subject:
    found = {places.get(rank, "") for rank in subject.ranks}
    node = found.pop() if len(found) == 1 else ""
    if subject.kind != "node":
        return replace(subject, node=node)
    everyone = tuple(sorted(rank for rank, where in places.items() if where == node))
    if node and everyone == tuple(sorted(subject.ranks)):
        return replace(subject, node=node)
    # What is one node to the daemon is several members, or a part of one: no single member may be blamed for it.
    return Subject("group", subject.ranks, node)
