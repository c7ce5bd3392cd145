"""Names what verdicts are about: a finding about all ranks of a node is about the node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from keepstep.monitor.records import Communicator
from keepstep.monitor.verdicts import Advice, Subject, Syndrome, Verdict


def rank_subject(rank: int, nodes: Mapping[int, str]) -> Subject:
    """Return the subject for one rank."""
    return Subject("rank", (rank,), nodes.get(rank, ""))


def node_subject(node: str, nodes: Mapping[int, str]) -> Subject:
    """Return the subject for a node with all its ranks."""
    return Subject(
        "node", tuple(sorted(rank for rank, rank_node in nodes.items() if rank_node == node)), node
    )


def group_subject(ranks: Iterable[int], nodes: Mapping[int, str]) -> Subject:
    """Return the subject for ranks among which the culprit is not known.

    A single rank becomes a rank subject.
    """
    members = tuple(sorted(ranks))
    if len(members) == 1:
        return rank_subject(members[0], nodes)
    member_nodes = {nodes.get(rank, "") for rank in members}
    return Subject("group", members, member_nodes.pop() if len(member_nodes) == 1 else "")


def group_name(communicators: Mapping[int, Communicator], identity: int) -> str:
    """Return a process group's name for people; PyTorch calls the default group 0."""
    communicator = communicators.get(identity)
    return f"group {communicator.name if communicator else identity}"


def link_subject(sender: int, receiver: int, nodes: Mapping[int, str]) -> Subject:
    """Return the subject for the link from one rank to another."""
    end_nodes = {nodes.get(sender, ""), nodes.get(receiver, "")}
    return Subject("link", (sender, receiver), end_nodes.pop() if len(end_nodes) == 1 else "")


def gather(ranks: Iterable[int], nodes: Mapping[int, str]) -> tuple[Subject, ...]:
    """Return the subjects of ranks.

    A node for all ranks of a node that has several; otherwise one subject for each rank.
    """
    by_node: dict[str, list[int]] = defaultdict(list)
    subjects: list[Subject] = []
    for rank in ranks:
        by_node[nodes.get(rank, "")].append(rank)
    sizes = Counter(nodes.values()) if by_node else Counter()
    for node, members in by_node.items():
        if node and len(members) > 1 and len(members) == sizes[node]:
            subjects.append(node_subject(node, nodes))
        else:
            subjects.extend(rank_subject(rank, nodes) for rank in members)
    return tuple(sorted(subjects, key=lambda subject: subject.ranks))


def with_job_nodes(verdicts: Iterable[Verdict], places: Mapping[int, str]) -> tuple[Verdict, ...]:
    """Return the verdicts with nodes named as the job's runtime names them.

    Verdicts on all ranks of a node are merged into one on the node.

    Args:
        verdicts: with nodes named as monitors name them.
        places: each rank's node, as the job's runtime names it.
    """
    return _merge_per_node(
        [replace(verdict, subject=_with_job_node(verdict.subject, places)) for verdict in verdicts],
        places,
    )


def begun_since(began_s: float, verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts whose fault began after the job did.

    Rings of an earlier run may still exist.

    Args:
        began_s: when the job began, by the clock of `Verdict.since_s`.
        verdicts: to select from.
    """
    return tuple(verdict for verdict in verdicts if verdict.since_s >= began_s)


def _merge_per_node(verdicts: Sequence[Verdict], places: Mapping[int, str]) -> tuple[Verdict, ...]:
    """Merge verdicts on ranks into one verdict on their node.

    Only where all ranks of a node, if it has several, have the same syndrome and need a restart.
    """
    restarts: dict[tuple[str, Syndrome], list[Verdict]] = defaultdict(list)
    merged = []
    for verdict in verdicts:
        if (
            verdict.subject.kind == "rank"
            and verdict.subject.node
            and verdict.advice is Advice.RESTART_WORKER
        ):
            restarts[verdict.subject.node, verdict.syndrome].append(verdict)
        else:
            merged.append(verdict)
    for (node, _), rank_verdicts in restarts.items():
        node_ranks = tuple(sorted(rank for rank, rank_node in places.items() if rank_node == node))
        named_ranks = sorted(rank for verdict in rank_verdicts for rank in verdict.subject.ranks)
        if len(rank_verdicts) < 2 or named_ranks != list(node_ranks):
            merged += rank_verdicts
            continue
        node_verdict = replace(
            rank_verdicts[0],
            subject=Subject("node", node_ranks, node),
            since_s=min(verdict.since_s for verdict in rank_verdicts),
            evidence=tuple(line for verdict in rank_verdicts[:4] for line in verdict.evidence[:2]),
            confidence=min(verdict.confidence for verdict in rank_verdicts),
            cost_s_per_step=max(verdict.cost_s_per_step for verdict in rank_verdicts),
            advice=Advice.REPLACE_NODE,
        )
        merged.append(node_verdict)
    return tuple(merged)


def _with_job_node(subject: Subject, places: Mapping[int, str]) -> Subject:
    if not subject.ranks:
        return subject  # A node without ranks, as a spare is, or the job.
    job_nodes = {places.get(rank, "") for rank in subject.ranks}
    node = job_nodes.pop() if len(job_nodes) == 1 else ""
    if subject.kind != "node":
        return replace(subject, node=node)
    node_ranks = tuple(sorted(rank for rank, rank_node in places.items() if rank_node == node))
    if node and node_ranks == tuple(sorted(subject.ranks)):
        return replace(subject, node=node)
    # To the monitor this is one node, to the job it is several members, or a part of one: no single
    # member may be blamed.
    return Subject("group", subject.ranks, node)
