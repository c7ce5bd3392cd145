"""Chooses the members of the next generation, their ranks and groups, and the resume snapshot.

Pure. `keepstep.elastic.rendezvous.decide` builds the leader's decisions on these functions.

Invariant: a node that was a member and may be one again keeps its ranks, as far as the number of
nodes allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle

from keepstep.checkpoint.parity.groups import group_nodes
from keepstep.elastic.rendezvous.records import (
    DomainLoss,
    Generation,
    Member,
    NodeRecord,
    ShardRebuild,
    SnapshotCommit,
)
from keepstep.elastic.rendezvous.standby import by_preference
from keepstep.elastic.rendezvous.view import View


def eligible(view: View) -> tuple[NodeRecord, ...]:
    """Return the nodes that may be members of the next generation, in the order they joined."""
    return tuple(
        joined.record
        for joined in sorted(view.nodes.values(), key=lambda joined: joined.created)
        if joined.record.warm
        and not joined.record.leaving
        and joined.record.node not in view.evictions
    )


@dataclass(frozen=True, slots=True)
class RankLimits:
    """How many ranks the training's mesh has places for.

    Attributes:
        multiple: the number must be a multiple of this: the product of the mesh's fixed sizes.
        most: the greatest number; 0 for any.
    """

    multiple: int = 1
    most: int = 0

    def allow(self, ranks: int) -> bool:
        """Whether a generation may have this many ranks."""
        return ranks > 0 and ranks % self.multiple == 0 and (not self.most or ranks <= self.most)


ANY_NUMBER = RankLimits()
"""What holds until the workers know the mesh."""


def rank_limits(view: View) -> RankLimits:
    """Return the limits of the job's mesh; none as long as no node's workers know it."""
    records = [joined.record for joined in view.nodes.values()]
    return RankLimits(
        max((record.rank_multiple for record in records), default=1),
        max((record.max_ranks for record in records), default=0),
    )


def assign_ranks(
    previous: Sequence[Member],
    nodes: Iterable[NodeRecord],
    max_nodes: int,
    limits: RankLimits = ANY_NUMBER,
    losses: Sequence[DomainLoss] = (),
) -> tuple[Member, ...]:
    """Choose the members and give them ranks: old members keep their place where it still exists.

    Old members come before standby nodes, and among equals those first that joined first. Standby
    nodes come in the order of `standby.by_preference`. If the mesh has no place for all, the last
    of them are on standby; no members are returned if none would fit. A place freed by a lost
    member goes to the first node without one; ranks follow the places in order.

    Args:
        previous: the members of the generation before.
        nodes: the nodes that may be members, in the order in which they joined.
        max_nodes: how many places there are.
        limits: how many ranks the mesh has places for.
        losses: recent losses of nodes, by failure domain.
    """
    old = {member.node: position for position, member in enumerate(previous)}
    present = list(nodes)
    staying = [record for record in present if record.node in old]
    standby = [record for record in present if record.node not in old]
    if previous and standby:
        standby = by_preference(standby, staying, losses, max_nodes - len(staying))
    chosen = _fitting([*staying, *standby], max_nodes, limits)
    places: list[NodeRecord | None] = [None] * len(chosen)
    without_place = []
    for record in chosen:
        position = old.get(record.node, len(places))
        if position < len(places):
            places[position] = record
        else:
            without_place.append(record)
    waiting = iter(without_place)
    members = []
    first_rank = 0
    for occupant in places:
        record = occupant if occupant is not None else next(waiting)
        members.append(
            Member(
                node=record.node,
                host=record.host,
                nproc=record.nproc,
                first_rank=first_rank,
                agent=record.agent,
                server=record.server,
                domain=record.domain,
            )
        )
        first_rank += record.nproc
    return tuple(members)


def _fitting(
    records: Sequence[NodeRecord], max_nodes: int, limits: RankLimits
) -> Sequence[NodeRecord]:
    """Return the first of these nodes, as many as the limits allow.

    Where nodes differ in size, nodes of one size alone are considered as well.
    """
    groups = [records]
    sizes = {record.nproc for record in records}
    if len(sizes) > 1:
        groups += [[r for r in records if r.nproc == size] for size in sorted(sizes, reverse=True)]
    best: Sequence[NodeRecord] = ()
    most = 0
    for group in groups:
        totals = accumulate(record.nproc for record in group[:max_nodes])
        for count, ranks in enumerate(totals, start=1):
            if ranks > most and limits.allow(ranks):
                best, most = group[:count], ranks
    return best


def assign_groups(
    members: Sequence[Member], view: View, size: int, parity: int
) -> tuple[tuple[Member, ...], int]:
    """Put members into erasure groups; return them and how many nodes of each may be lost.

    That is at most `parity`, and fewer than the smallest group has nodes.
    """
    domains = [view.nodes[member.node].record.domain for member in members]
    groups = group_nodes(domains, size, parity)
    smallest = min(Counter(groups).values())
    placed = tuple(
        replace(member, group=group) for member, group in zip(members, groups, strict=True)
    )
    return placed, min(parity, smallest - 1)


def trusts_uncommitted(view: View) -> bool:
    """Whether snapshots of the generation that closes are what training computed, if sealed."""
    return view.abort_order is None or view.abort_order.all_fenced


def newest_restorable(view: View, generation: Generation) -> SnapshotCommit | None:
    """Return the newest snapshot, committed or not, that the present members can restore."""
    candidates = [replace(view.snapshot, shard_rebuilds=())] if view.snapshot else []
    sealed = {
        snapshot
        for record in present_members(view, generation)
        for snapshot in record.sealed
        if snapshot.generation == generation.generation and trusts_uncommitted(view)
    }
    candidates += [
        SnapshotCommit(snapshot, generation.members, generation.parity) for snapshot in sealed
    ]
    return max(
        (commit for commit in candidates if _is_restorable(view, commit)),
        key=lambda commit: (commit.snapshot.step, commit.snapshot.generation),
        default=None,
    )


def completed_by_storage(view: View) -> SnapshotCommit | None:
    """Return the committed snapshot with its remaining holders, if it is in storage, too."""
    commit, stored = view.snapshot, view.checkpoint
    if commit is None or stored is None or (stored.generation, stored.step) != (
        commit.snapshot.generation, commit.snapshot.step
    ):  # fmt: skip
        return None
    absent = absent_holders(view, commit)
    holders = tuple(member for member in commit.holders if member not in absent)
    return (
        replace(
            commit,
            holders=holders,
            absent=(*commit.absent, *(member.node for member in absent)),
            shard_rebuilds=(),
            stored=stored.url,
            stored_generation=stored.base + stored.generation,
        )
        if holders
        else None
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
    """Assign the shards of absent holders to members that rebuild them.

    The member that has the lost rank now rebuilds its shard; the other shards go to all in turn.
    """
    lost = [rank for member in absent_holders(view, commit) for rank in member.ranks]
    places = {rank: member for member in members for rank in member.ranks} if lost else {}
    turns = cycle(members)
    shard_rebuilds = []
    for rank in lost:
        adopter = places.get(rank) or next(turns)
        shard_rebuilds.append(ShardRebuild(rank, adopter.node, adopter.server))
    return replace(commit, shard_rebuilds=tuple(shard_rebuilds))


def _is_restorable(view: View, commit: SnapshotCommit) -> bool:
    """Whether parity gives back what is missing in every group, if anything is."""
    absent = {member.node for member in absent_holders(view, commit)}
    if absent and commit.stored:
        # Its groups have lost holders before, so parity gives nothing back.
        return False
    lost = Counter(member.group for member in commit.holders if member.node in absent)
    if any(count > commit.parity for count in lost.values()):
        return False
    return all(
        commit.snapshot in view.nodes[member.node].record.protected
        for member in commit.holders
        if member.group in lost and member.node not in absent
    )


def present_members(view: View, generation: Generation) -> list[NodeRecord]:
    """Return the records of a generation's members that are still present.

    An agent that joined later under a member's name is not that member.
    """
    return [
        joined.record
        for member in generation.members
        if (joined := view.nodes.get(member.node)) is not None
        and joined.record.server == member.server
    ]
