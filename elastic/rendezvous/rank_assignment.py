"""Who may be a member of the next generation, as which ranks, who protects whom, and which snapshot it resumes from.

Pure. What the leader's decisions (`keepstep.elastic.rendezvous.decide`) rest on.

Invariant: whoever was a member and may be one again keeps its ranks, as far as the number of nodes allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle

from keepstep.checkpoint.parity.groups import group_nodes
from keepstep.elastic.rendezvous.records import (
    Generation,
    Member,
    NodeRecord,
    ShardRebuild,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.view import View


def eligible(view: View) -> tuple[NodeRecord, ...]:
    """Nodes that may be members of the next generation, those that joined first in front."""
    return tuple(
        joined.record
        for joined in sorted(view.nodes.values(), key=lambda joined: joined.created)
        if joined.record.warm
        and not joined.record.leaving
        and joined.record.node not in view.evictions
    )


def assign_ranks(
    previous: Sequence[Member], nodes: Iterable[NodeRecord], max_nodes: int
) -> tuple[Member, ...]:
    """Choose the members and give them ranks: old members keep their place where it still exists.

    Old members come before spares, and among equals those first that joined first. A place freed by a lost member goes to
    the first node without one; ranks follow the places in order.
    """
    old = {member.node: position for position, member in enumerate(previous)}
    by_right = sorted(enumerate(nodes), key=lambda item: (item[1].node not in old, item[0]))
    chosen = [record for _, record in by_right][:max_nodes]
    places: list[NodeRecord | None] = [None] * len(chosen)
    homeless = []
    for record in chosen:
        position = old.get(record.node, len(places))
        if position < len(places):
            places[position] = record
        else:
            homeless.append(record)
    waiting = iter(homeless)
    members = []
    first_rank = 0
    for occupant in places:
        record = occupant if occupant is not None else next(waiting)
        members.append(
            Member(record.node, record.host, record.nproc, first_rank, record.agent, record.server)
        )
        first_rank += record.nproc
    return tuple(members)


def assign_groups(
    members: Sequence[Member], view: View, size: int, parity: int
) -> tuple[tuple[Member, ...], int]:
    """Put members into erasure groups; return them with how many nodes of each group may be lost, at most `parity`."""
    domains = [view.nodes[member.node].record.domain for member in members]
    groups = group_nodes(domains, size, parity)
    smallest = min(Counter(groups).values())
    placed = tuple(
        replace(member, group=group) for member, group in zip(members, groups, strict=True)
    )
    return placed, min(parity, smallest - 1)


def newest_restorable(view: View, generation: Generation) -> SnapshotCommit | None:
    """Return the newest snapshot that those who are present can give back whole, committed or not."""
    found = [replace(view.snapshot, shard_rebuilds=())] if view.snapshot else []
    sealed = {
        snapshot
        for record in present_members(view, generation)
        for snapshot in record.sealed
        if snapshot.generation == generation.generation
    }
    found += [
        SnapshotCommit(snapshot, generation.members, generation.parity) for snapshot in sealed
    ]
    return max(
        (commit for commit in found if _is_restorable(view, commit)),
        key=lambda commit: (commit.snapshot.step, commit.snapshot.generation),
        default=None,
    )


def completed_by_storage(view: View) -> SnapshotCommit | None:
    """Return the committed snapshot with those who still hold parts of it, if all of it is in storage, too."""
    commit, stored = view.snapshot, view.checkpoint
    if commit is None or stored is None or (stored.generation, stored.step) != (
        commit.snapshot.generation, commit.snapshot.step
    ):  # fmt: skip
        return None
    absent = absent_holders(view, commit)
    holders = tuple(member for member in commit.holders if member not in absent)
    return (
        replace(commit, holders=holders, shard_rebuilds=(), stored=stored.url) if holders else None
    )


def absent_holders(view: View, commit: SnapshotCommit) -> tuple[Member, ...]:
    """Return the holders of a snapshot that are gone, or no longer hold it."""
    return tuple(
        member
        for member in commit.holders
        if member.node not in view.nodes
        or commit.snapshot not in view.nodes[member.node].record.sealed
    )


def with_shard_rebuilds(
    commit: SnapshotCommit, view: View, members: Sequence[Member]
) -> SnapshotCommit:
    """Have members rebuild the shards of holders that are absent: whoever is the lost rank now, else all in turn."""
    lost = [rank for member in absent_holders(view, commit) for rank in member.ranks]
    turns = cycle(members)
    shard_rebuilds = []
    for rank in lost:
        adopter = next((member for member in members if rank in member.ranks), None) or next(turns)
        shard_rebuilds.append(ShardRebuild(rank, adopter.node, adopter.server))
    return replace(commit, shard_rebuilds=tuple(shard_rebuilds))


def _is_restorable(view: View, commit: SnapshotCommit) -> bool:
    """Whether in every group either all shards are there, or no more are missing than the parity of the others gives back."""
    absent = {member.node for member in absent_holders(view, commit)}
    if absent and commit.stored:
        # Its groups are no longer whole, so parity gives nothing back.
        return False
    for group in {member.group for member in commit.holders}:
        members = [member for member in commit.holders if member.group == group]
        left = [member for member in members if member.node not in absent]
        if len(members) - len(left) > commit.parity:
            return False
        protect = all(
            commit.snapshot in view.nodes[member.node].record.protected for member in left
        )
        if len(left) < len(members) and not protect:
            return False
    return True


def present_members(view: View, generation: Generation) -> list[NodeRecord]:
    """Return the records of those members of a generation that are still here: not of agents that came later under their names."""
    return [
        joined.record
        for member in generation.members
        if (joined := view.nodes.get(member.node)) is not None
        and joined.record.server == member.server
    ]
