"""Who waits for whom, over all communicators and pairs, and who waits for nobody.

The graph has two kinds of nodes. A rank points to the operations that it has under way; an operation points to the ranks that have not
begun it. Following it from any waiting rank ends in one of three ways: at a rank that has nothing under way (it never arrived), at
an operation that all have begun (it does not end), or nowhere (a cycle: a deadlock by order). Whoever lies on the way is innocent.

Ranks that lack at operation k also lack at every later one of the same communicator, so a later operation points to the earlier one
instead of repeating its ranks: the graph stays linear in ranks and communicators.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.records import Communicator, Operation


@dataclass(frozen=True, slots=True)
class OpenOperation:
    """An operation under way.

    Args:
        communicator: its id.
        number: within its channel.
        pair: (sender, receiver) of a message; None for a collective.
        waiting: ranks that have it as their first one under way.
        missing: ranks that have not begun it, but for those that lack already at `earlier`.
        earlier: position of an earlier open operation of the same communicator, or -1.
    """

    communicator: int
    number: int
    pair: tuple[int, int] | None
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    earlier: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Where all waiting ends.

    Args:
        operations: all operations under way.
        absent: ranks that others wait for and that wait for nobody, with the ranks that wait for them at once.
        stuck: operations that all have begun.
        cycle: ranks that wait for each other in a circle, in order; empty if there is none.
    """

    operations: tuple[OpenOperation, ...]
    absent: Mapping[int, tuple[int, ...]]
    stuck: tuple[OpenOperation, ...]
    cycle: tuple[int, ...]


def wait_for(
    frontiers: np.ndarray,
    communicators: Mapping[int, Communicator],
    silent: Collection[int] = frozenset(),
) -> Waits:
    """Build the graph of frontiers (dtype FRONTIER) and follow it.

    Args:
        frontiers: of all ranks; each channel once.
        communicators: of the job.
        silent: ranks of which is known that they wait for nobody, whatever they last told: dead, stopped or not heard of.
    """
    operations = (*_collectives(frontiers, communicators), *_messages(frontiers))
    of_rank: dict[int, list[int]] = defaultdict(list)
    for position, operation in enumerate(operations):
        for rank in operation.waiting:
            if rank not in silent:
                of_rank[rank].append(position)
    absent: dict[int, set[int]] = defaultdict(set)
    before_rank: dict[int, list[int]] = defaultdict(list)
    before_operation: dict[int, list[int]] = defaultdict(list)
    lacking = _lacking(operations)
    for position, operation in enumerate(operations):
        if operation.earlier >= 0:
            before_operation[operation.earlier].append(position)
        for rank in operation.missing:
            before_rank[rank].append(position)
            if not of_rank.get(rank):
                absent[rank].update(operation.waiting)
    stuck = [position for position in range(len(operations)) if not lacking[position]]
    ends_well = _reaching(operations, of_rank, before_rank, before_operation, set(absent), stuck)
    astray = [rank for rank in sorted(of_rank) if rank not in ends_well]
    return Waits(
        operations,
        {rank: tuple(sorted(waiters)) for rank, waiters in sorted(absent.items())},
        tuple(operations[position] for position in stuck),
        _cycle(astray[0], operations, of_rank) if astray else (),
    )


def _collectives(
    frontiers: np.ndarray, communicators: Mapping[int, Communicator]
) -> list[OpenOperation]:
    rows = frontiers[frontiers["direction"] == 0]
    opened = np.unique(rows["communicator"][rows["open"] > 0])
    rows = rows[np.isin(rows["communicator"], opened)]
    rows = rows[np.argsort(rows["communicator"], kind="stable")]
    found: list[OpenOperation] = []
    begins = np.searchsorted(rows["communicator"], opened, side="left")
    ends = np.searchsorted(rows["communicator"], opened, side="right")
    for identity, begin, end in zip(opened.tolist(), begins.tolist(), ends.tolist(), strict=True):
        known = communicators.get(identity)
        if known is None:
            continue
        part = rows[begin:end]
        entered = dict(zip(part["rank"].tolist(), part["entered"].tolist(), strict=True))
        waiting: dict[int, list[int]] = defaultdict(list)
        for rank, number in zip(part["rank"].tolist(), part["open"].tolist(), strict=True):
            if number:
                waiting[number].append(rank)
        # By how far they are, so that each rank is looked at once for all operations.
        members = sorted(((entered.get(rank, 0), rank) for rank in known.ranks), reverse=True)
        earlier = -1
        for number in sorted(waiting):
            missing = []
            while members and members[-1][0] < number:
                missing.append(members.pop()[1])
            found.append(
                OpenOperation(
                    identity,
                    number,
                    None,
                    tuple(sorted(waiting[number])),
                    tuple(sorted(missing)),
                    earlier,
                )
            )
            earlier = len(found) - 1
    return found


def _messages(frontiers: np.ndarray) -> list[OpenOperation]:
    rows = frontiers[(frontiers["direction"] > 0) & (frontiers["peer"] >= 0)]
    if not (rows["open"] > 0).any():
        return []
    entered: dict[tuple[int, int, int, int], int] = {}
    opened: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    columns = (
        rows[name].tolist()
        for name in ("rank", "communicator", "direction", "peer", "entered", "open")
    )
    for rank, communicator, direction, peer, reached, number in zip(*columns, strict=True):
        entered[rank, communicator, direction, peer] = reached
        if number:
            pair = (rank, peer) if direction == Operation.SEND else (peer, rank)
            opened[communicator, number, *pair].append(rank)
    found = []
    for (communicator, number, sender, receiver), waiting in sorted(opened.items()):
        has_sent = entered.get((sender, communicator, int(Operation.SEND), receiver), 0) >= number
        has_received = (
            entered.get((receiver, communicator, int(Operation.RECEIVE), sender), 0) >= number
        )
        missing = tuple(
            rank for rank, came in ((sender, has_sent), (receiver, has_received)) if not came
        )
        found.append(
            OpenOperation(
                communicator, number, (sender, receiver), tuple(sorted(waiting)), missing, -1
            )
        )
    return found


def _lacking(operations: tuple[OpenOperation, ...]) -> list[bool]:
    """Return for each operation whether somebody has not begun it; `earlier` always points backwards."""
    lacking: list[bool] = []
    for operation in operations:
        lacking.append(
            bool(operation.missing) or (operation.earlier >= 0 and lacking[operation.earlier])
        )
    return lacking


def _reaching(
    operations: tuple[OpenOperation, ...],
    of_rank: Mapping[int, list[int]],
    before_rank: Mapping[int, list[int]],
    before_operation: Mapping[int, list[int]],
    absent: set[int],
    stuck: list[int],
) -> set[int]:
    """Return the ranks from which some way leads to an absent rank or a stuck operation, by walking back from these."""
    ranks = set(absent)
    visited = set(stuck)
    queue = deque(stuck)
    for rank in absent:
        for position in before_rank.get(rank, ()):
            if position not in visited:
                visited.add(position)
                queue.append(position)
    while queue:
        position = queue.popleft()
        following = list(before_operation.get(position, ()))
        for rank in operations[position].waiting:
            if rank not in ranks and rank in of_rank:
                ranks.add(rank)
                following.extend(before_rank.get(rank, ()))
        for other in following:
            if other not in visited:
                visited.add(other)
                queue.append(other)
    return ranks


def _cycle(
    start: int, operations: tuple[OpenOperation, ...], of_rank: Mapping[int, list[int]]
) -> tuple[int, ...]:
    """Follow first edges from a rank none of whose ways ends, until a rank comes again."""
    path: list[int] = []
    position_of: dict[int, int] = {}
    rank = start
    while rank not in position_of:
        position_of[rank] = len(path)
        path.append(rank)
        operation = operations[of_rank[rank][0]]
        while not operation.missing:
            operation = operations[operation.earlier]
        rank = operation.missing[0]
    circle = path[position_of[rank] :]
    first = circle.index(min(circle))
    return tuple(circle[first:] + circle[:first])
