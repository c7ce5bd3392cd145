"""Who may be a member of the next generation, as which ranks, and which snapshot it resumes from.

Pure. What the leader's decisions (`elastic.rendezvous`) rest on.

Invariant: whoever was a member and may be one again keeps its ranks, as far as the number of nodes allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.records import Generation, Member, NodeRecord, SnapshotCommit, SnapshotId
from elastic.view import View


def eligible(view: View) -> tuple[NodeRecord, ...]:
    """Nodes that may be members of the next generation, those that joined first in front."""
    return tuple(
        joined.record
        for joined in sorted(view.nodes.values(), key=lambda joined: joined.created)
        if joined.record.warm and not joined.record.leaving and joined.record.node not in view.evictions
    )


def place(previous: Sequence[Member], nodes: Iterable[NodeRecord], max_nodes: int) -> tuple[Member, ...]:
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
        members.append(Member(record.node, record.host, record.nproc, first_rank, record.agent, record.server))
        first_rank += record.nproc
    return tuple(members)


def newest_restorable(view: View, generation: Generation) -> SnapshotCommit | None:
    """Return the newest snapshot whose every holder is present and still holds it, committed or sealed by all."""

    def held(snapshot: SnapshotId, holders: Sequence[Member]) -> bool:
        return all(
            member.node in view.nodes and snapshot in view.nodes[member.node].record.sealed for member in holders
        )

    found = [view.snapshot] if view.snapshot and held(view.snapshot.snapshot, view.snapshot.holders) else []
    sealed = {
        snapshot
        for record in present_members(view, generation)
        for snapshot in record.sealed
        if snapshot.generation == generation.generation
    }
    found += [SnapshotCommit(snapshot, generation.members) for snapshot in sealed if held(snapshot, generation.members)]
    return max(found, key=lambda commit: (commit.snapshot.step, commit.snapshot.generation), default=None)


def present_members(view: View, generation: Generation) -> list[NodeRecord]:
    """Return the records of those members of a generation that are still here."""
    return [view.nodes[m.node].record for m in generation.members if m.node in view.nodes]
