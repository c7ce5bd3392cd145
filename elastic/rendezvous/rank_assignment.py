"""Chooses the members of the next generation, their ranks and groups, and the resume snapshot.

Pure. The leader's decisions (`keepstep.elastic.rendezvous.decide`) are built on these functions.

Invariant: a node that was a member and may be one again keeps its ranks, as far as the number of
nodes allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle

from keepstep.checkpoint.format.layout.integers import ceil_div
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.elastic.rendezvous.rank_limits import (
    ANY_NUMBER,
    RankLimits,
    largest_sum,
    largest_sum_of_few,
)
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


def rank_limits(view: View) -> RankLimits:
    """Return the limits of the job's mesh; none as long as no node's workers know it."""
    known = {
        (record.rank_multiple, record.max_ranks, record.fitting_ranks)
        for record in (joined.record for joined in view.nodes.values())
    }
    # All run one script; if they do not, the same record counts for everybody.
    return RankLimits(*max(known, default=(1, 0, "")))


def assign_ranks(
    previous: Sequence[Member],
    nodes: Iterable[NodeRecord],
    max_nodes: int,
    limits: RankLimits = ANY_NUMBER,
    losses: Sequence[DomainLoss] = (),
) -> tuple[Member, ...]:
    """Choose the members and give them ranks: old members keep their place where it still exists.

    Old members come before standby nodes of their size, and those first that joined first. Standby
    nodes come in the order of `standby.by_preference`. If the mesh has no place for all, the last
    of them are on standby; no members are returned if none would fit. A place freed by a lost
    member goes to the first node without one; ranks follow the places in order.

    Args:
        previous: the members of the generation before.
        nodes: the nodes that may be members, in the order in which they joined.
        max_nodes: how many places there are.
        limits: the numbers of ranks for which the mesh has places.
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
    """Return the nodes with the most ranks that the limits allow, the first ones if equal."""
    sizes = [record.nproc for record in records]
    chosen = largest_sum(sizes[:max_nodes], limits)
    if len(set(sizes)) > 1 and len(sizes) > max_nodes:
        # Larger nodes may be among those for which the first ones leave no place.
        others = largest_sum_of_few(sizes, max_nodes, limits)
        if sum(sizes[position] for position in others) > sum(sizes[p] for p in chosen):
            chosen = others
    return [records[position] for position in chosen]


def assign_groups(
    members: Sequence[Member], view: View, size: int, parity: int
) -> tuple[tuple[Member, ...], int]:
    """Put members into erasure groups; return them and how many nodes of each may be lost.

    The latter is at most `parity`, and less than the smallest group's number of nodes.
    """
    domains = [view.nodes[member.node].record.domain for member in members]
    groups = group_nodes(domains, size, parity)
    smallest = min(Counter(groups).values())
    placed = tuple(
        replace(member, group=group) for member, group in zip(members, groups, strict=True)
    )
    return placed, min(parity, smallest - 1)


def group_nodes(domains: Sequence[str], size: int, parity: int) -> tuple[int, ...]:
    """Return each node's erasure group, numbered from 0, with failure domains spread over groups.

    Nodes of one rack or switch tend to fail together, so the nodes of a domain go to different
    groups in turn: no other assignment to as many groups puts fewer nodes of one domain together.

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


def trusts_uncommitted(view: View) -> bool:
    """Whether sealed snapshots of the generation that closes are the results of training."""
    return view.abort_order is None or view.abort_order.all_fenced


def newest_known_commit(present: Iterable[NodeRecord], generation: Generation) -> SnapshotId | None:
    """Return the newest snapshot of a generation that present members know as committed."""
    number = generation.generation
    commits = (record.committed for record in present)
    return max((s for s in commits if s is not None and s.generation == number), default=None)


def newest_committed(view: View, generation: Generation) -> SnapshotCommit | None:
    """Return the newest snapshot that is committed, as far as the remaining members know.

    A commit that reached a member after the order to abort may be of garbage that an abort has
    left.
    """
    newest = (
        newest_known_commit(present_members(view, generation), generation)
        if view.abort_order is None
        else view.abort_order.committed
    )
    if newest is None or (view.snapshot is not None and newest <= view.snapshot.snapshot):
        return view.snapshot
    return SnapshotCommit(newest, generation.members, generation.parity)


def newest_restorable(view: View, generation: Generation) -> SnapshotCommit | None:
    """Return the newest snapshot, committed or not, that the present members can restore."""
    commits = (view.snapshot, newest_committed(view, generation))
    candidates = [replace(commit, shard_rebuilds=()) for commit in commits if commit is not None]
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
        or not _holds(view.nodes[member.node].record, commit.snapshot)
    )


def _holds(record: NodeRecord, snapshot: SnapshotId) -> bool:
    """Whether a node holds a snapshot: a node that knows a newer commit has freed it."""
    is_freed = record.committed is not None and snapshot < record.committed
    return snapshot in record.sealed and not is_freed


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
    """Whether parity rebuilds the missing shards in every group, if there are any."""
    absent = {member.node for member in absent_holders(view, commit)}
    if absent and commit.stored:
        # Its groups have lost holders before, so parity rebuilds nothing.
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


def records_in(records: Iterable[NodeRecord], generation: Generation) -> list[NodeRecord]:
    """Return the records that describe the node in this generation."""
    return [record for record in records if record.generation == generation.generation]
