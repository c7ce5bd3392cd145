"""Chooses which standby nodes take free places, so that a failure domain takes as few as it can.

Pure. A standby node is warm and has no place in the generation. Erasure groups are spread over the
failure domains of their members (`rank_assignment.group_nodes`): the more evenly members are
distributed over domains, the fewer nodes a group loses with one of them. So a place goes to a node
of the domain that has the fewest members, which most often is the lost node's. If several nodes of
a domain were lost of late, the domain itself may be failing: its nodes come last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from keepstep.elastic.rendezvous.records import DomainLoss, Generation, NodeRecord

_RECENT_S = 3600.0
_MOST_LOSSES = 64


def losses_until(old: Generation, here: Collection[str], wall_s: float) -> tuple[DomainLoss, ...]:
    """Return the recent losses of nodes whose failure domain is known, oldest first.

    Args:
        old: the generation that ends, with the losses before it.
        here: names of the nodes that are present.
        wall_s: wall-clock seconds.
    """
    lost = (
        DomainLoss(member.domain, wall_s)
        for member in old.members
        if member.domain and member.node not in here
    )
    recent = (loss for loss in old.losses if loss.at_s > wall_s - _RECENT_S)
    return (*recent, *lost)[-_MOST_LOSSES:]


def by_preference(
    standby: Sequence[NodeRecord],
    staying: Iterable[NodeRecord],
    losses: Iterable[DomainLoss],
    places: int,
) -> list[NodeRecord]:
    """Return standby nodes in the order in which they are to take free places.

    A place goes to a node whose domain is not failing; then to one of the domain with the fewest
    members; then to the one that joined first. A node without a known domain fails on its own.

    Args:
        standby: the nodes without a place, in the order in which they joined.
        staying: the nodes that keep theirs.
        losses: recent losses by domain.
        places: how many places are free; nodes beyond that keep their order.
    """
    failing = {
        domain for domain, count in Counter(loss.domain for loss in losses).items() if count > 1
    }
    members = Counter(record.domain for record in staying if record.domain)
    waiting: dict[str, list[int]] = defaultdict(list)
    for number in reversed(range(len(standby))):
        waiting[standby[number].domain].append(number)
    chosen: list[int] = []
    for _ in range(min(places, len(standby))):
        domain = min(waiting, key=lambda name: (name in failing, members[name], waiting[name][-1]))
        chosen.append(waiting[domain].pop())
        if not waiting[domain]:
            del waiting[domain]
        if domain:
            members[domain] += 1
    taken = set(chosen)
    rest = (number for number in range(len(standby)) if number not in taken)
    return [standby[number] for number in (*chosen, *rest)]
