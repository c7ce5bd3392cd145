"""Builds the graph of who waits for whom, over all communicators and pairs, and follows it.

The graph has two kinds of nodes. A rank points to its open operations; an operation points to the
ranks that have not begun it. Following it from any waiting rank ends in one of three ways: at a
rank without open operations (it never arrived), at an operation that all ranks have begun (it does
not end), or nowhere (a cycle: a deadlock by order). A rank on the way is not at fault.

A rank has not begun what is in a queue of its device behind other work, and does not point to it:
its own earlier work is what it and the others wait for.

A rank that is missing in operation k is also missing in every later operation of the same
communicator. A later operation therefore points to the earlier one instead of repeating its ranks:
the graph stays linear in ranks and communicators.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from keepstep.monitor.diagnosis.digest import match_channels
from keepstep.monitor.records import Communicator, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOperation:
    """An operation that has begun and not ended.

    Args:
        communicator: its id.
        number: within its channel.
        pair: (sender, receiver) of a message; None for a collective.
        waiting: ranks whose first open operation this is; none, if all that called it are missing.
        missing: ranks that have not begun it, except those already missing in `earlier`.
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
        operations: all open operations.
        absent: ranks that others wait for and that wait for no rank, with the ranks that wait for
            them directly; also ranks whose own device has not begun what they called.
        stuck: operations that all ranks have begun.
        cycle: ranks that wait for each other in a cycle, in order; empty if there is none.
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
    """Build the graph from frontiers, and follow it.

    Args:
        frontiers: dtype FRONTIER, of all ranks; each channel once.
        communicators: of the job.
        silent: ranks known to wait for no rank, whatever they last recorded: dead, stopped or not
            read.
    """
    operations = (*_collectives(frontiers, communicators), *_messages(frontiers))
    open_of_rank: dict[int, list[int]] = defaultdict(list)
    for position, operation in enumerate(operations):
        for rank in operation.waiting:
            if rank not in silent:
                open_of_rank[rank].append(position)
    absent: dict[int, set[int]] = defaultdict(set)
    waits_for_rank: dict[int, list[int]] = defaultdict(list)
    waits_for_operation: dict[int, list[int]] = defaultdict(list)
    is_incomplete = _incomplete(operations)
    for position, operation in enumerate(operations):
        if operation.earlier >= 0:
            waits_for_operation[operation.earlier].append(position)
        for rank in operation.missing:
            waits_for_rank[rank].append(position)
            if not open_of_rank.get(rank):
                absent[rank].update(operation.waiting)
    stuck = [position for position in range(len(operations)) if not is_incomplete[position]]
    resolved = _resolved_ranks(
        operations, open_of_rank, waits_for_rank, waits_for_operation, set(absent), stuck
    )
    unresolved = [rank for rank in sorted(open_of_rank) if rank not in resolved]
    return Waits(
        operations=operations,
        absent={rank: tuple(sorted(waiters)) for rank, waiters in sorted(absent.items())},
        stuck=tuple(operations[position] for position in stuck),
        cycle=_cycle(unresolved[0], operations, open_of_rank) if unresolved else (),
    )


def waiting_ranks(
    frontiers: np.ndarray, communicators: Mapping[int, Communicator]
) -> frozenset[int]:
    """Return the ranks that wait for others in an operation.

    A rank may compute during an asynchronous operation. It counts as waiting there while some
    member has not begun the operation. The member that begins last has never such an operation
    open in that communicator, so the rank that holds up the others does not count.

    Takes n log n time in the number of frontiers: called in every round, also of a healthy job.

    Args:
        frontiers: dtype FRONTIER, of all ranks; each channel once.
        communicators: of the job.
    """
    is_open = frontiers["open"] > 0
    is_asynchronous = is_open & frontiers["asynchronous"]
    is_waiting = is_open & ~frontiers["asynchronous"]
    is_collective = frontiers["direction"] == 0
    calls = np.flatnonzero(is_asynchronous & is_collective)
    if len(calls):
        least_begun = _least_begun(
            frontiers["communicator"][is_collective],
            frontiers["began"][is_collective],
            communicators,
            frontiers["communicator"][calls],
        )
        is_waiting[calls] = frontiers["open"][calls] > least_begun
    calls = np.flatnonzero(is_asynchronous & ~is_collective & (frontiers["peer"] >= 0))
    if len(calls):
        is_waiting[calls] = frontiers["open"][calls] > _begun_by_peer(frontiers, calls)
    return frozenset(frontiers["rank"][is_waiting].tolist())


def _least_begun(
    identity: np.ndarray,
    began: np.ndarray,
    communicators: Mapping[int, Communicator],
    wanted: np.ndarray,
) -> np.ndarray:
    """Return for each wanted communicator the highest number that all of its members have begun.

    Args:
        identity: communicator of each frontier of collectives, of all ranks.
        began: the highest number that its rank has begun there.
        communicators: of the job; members of others are those that have frontiers.
        wanted: communicators that have frontiers.
    """
    identities, index, counts = np.unique(identity, return_inverse=True, return_counts=True)
    least = np.full(len(identities), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(least, index, began)
    members = (communicators.get(identity) for identity in identities.tolist())
    sizes = np.array([len(communicator.ranks) if communicator else 0 for communicator in members])
    least[counts < sizes] = 0
    least_begun: np.ndarray = least[np.searchsorted(identities, wanted)]
    return least_begun


def _begun_by_peer(frontiers: np.ndarray, calls: np.ndarray) -> np.ndarray:
    """Return the highest number that the other side of each message has begun.

    Args:
        frontiers: dtype FRONTIER, of all ranks.
        calls: positions of the frontiers of messages.
    """
    messages = frontiers.compress(frontiers["direction"] > 0)
    sides = frontiers.take(calls)
    peers = sides.copy()
    peers["rank"], peers["peer"] = sides["peer"], sides["rank"]
    is_send = sides["direction"] == Operation.SEND
    peers["direction"] = np.where(is_send, Operation.RECEIVE, Operation.SEND)
    is_known, position = match_channels(peers, messages)
    begun: np.ndarray = np.where(is_known, messages["began"][position], 0)
    return begun


def _collectives(
    frontiers: np.ndarray, communicators: Mapping[int, Communicator]
) -> list[OpenOperation]:
    """Return the open collectives, by communicator and number."""
    rows = frontiers[frontiers["direction"] == 0]
    is_pending = (rows["open"] > 0) | (rows["queued"] > 0)
    open_communicators = np.unique(rows["communicator"][is_pending])
    rows = rows[np.isin(rows["communicator"], open_communicators)]
    rows = rows[np.argsort(rows["communicator"], kind="stable")]
    operations: list[OpenOperation] = []
    begins = np.searchsorted(rows["communicator"], open_communicators, side="left")
    ends = np.searchsorted(rows["communicator"], open_communicators, side="right")
    for identity, begin, end in zip(
        open_communicators.tolist(), begins.tolist(), ends.tolist(), strict=True
    ):
        communicator = communicators.get(identity)
        if communicator is None:
            continue
        group = rows[begin:end]
        began = dict(zip(group["rank"].tolist(), group["began"].tolist(), strict=True))
        waiting: dict[int, list[int]] = defaultdict(list)
        for rank, number in zip(group["rank"].tolist(), group["open"].tolist(), strict=True):
            if number:
                waiting[number].append(rank)
        if not waiting:
            # Nobody is in an operation: those whose devices have not begun one hold up themselves.
            operations.extend(_queued_only(identity, group))
            continue
        # Sorted by progress, so each rank is looked at once for all operations.
        members = sorted(((began.get(rank, 0), rank) for rank in communicator.ranks), reverse=True)
        earlier = -1
        for number in sorted(waiting):
            missing = []
            while members and members[-1][0] < number:
                missing.append(members.pop()[1])
            operations.append(
                OpenOperation(
                    communicator=identity,
                    number=number,
                    pair=None,
                    waiting=tuple(sorted(waiting[number])),
                    missing=tuple(sorted(missing)),
                    earlier=earlier,
                )
            )
            earlier = len(operations) - 1
    return operations


def _queued_only(identity: int, group: np.ndarray) -> list[OpenOperation]:
    """Return the collectives of a communicator that ranks have called and no device has begun."""
    missing: dict[int, list[int]] = defaultdict(list)
    for rank, number in zip(group["rank"].tolist(), group["queued"].tolist(), strict=True):
        if number:
            missing[number].append(rank)
    return [
        OpenOperation(
            communicator=identity,
            number=number,
            pair=None,
            waiting=(),
            missing=tuple(sorted(ranks)),
            earlier=-1,
        )
        for number, ranks in sorted(missing.items())
    ]


def _messages(frontiers: np.ndarray) -> list[OpenOperation]:
    """Return the open messages between pairs."""
    rows = frontiers[(frontiers["direction"] > 0) & (frontiers["peer"] >= 0)]
    if not (rows["open"] > 0).any():
        return []
    began: dict[tuple[int, int, int, int], int] = {}
    open_messages: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    columns = (
        rows[name].tolist()
        for name in ("rank", "communicator", "direction", "peer", "began", "open")
    )
    for rank, communicator, direction, peer, newest, number in zip(*columns, strict=True):
        began[rank, communicator, direction, peer] = newest
        if number:
            pair = (rank, peer) if direction == Operation.SEND else (peer, rank)
            open_messages[communicator, number, *pair].append(rank)
    operations = []
    for (communicator, number, sender, receiver), waiting in sorted(open_messages.items()):
        has_sent = began.get((sender, communicator, int(Operation.SEND), receiver), 0) >= number
        has_received = (
            began.get((receiver, communicator, int(Operation.RECEIVE), sender), 0) >= number
        )
        missing = tuple(
            rank
            for rank, has_begun in ((sender, has_sent), (receiver, has_received))
            if not has_begun
        )
        operations.append(
            OpenOperation(
                communicator=communicator,
                number=number,
                pair=(sender, receiver),
                waiting=tuple(sorted(waiting)),
                missing=missing,
                earlier=-1,
            )
        )
    return operations


def _incomplete(operations: tuple[OpenOperation, ...]) -> list[bool]:
    """Return for each operation whether some rank has not begun it.

    Relies on `earlier` always pointing backwards.
    """
    incomplete: list[bool] = []
    for operation in operations:
        incomplete.append(
            bool(operation.missing) or (operation.earlier >= 0 and incomplete[operation.earlier])
        )
    return incomplete


def _resolved_ranks(
    operations: tuple[OpenOperation, ...],
    open_of_rank: Mapping[int, list[int]],
    waits_for_rank: Mapping[int, list[int]],
    waits_for_operation: Mapping[int, list[int]],
    absent: set[int],
    stuck: list[int],
) -> set[int]:
    """Return the ranks from which some path leads to an absent rank or a stuck operation.

    Walks backwards from these.
    """
    ranks = set(absent)
    visited = set(stuck)
    queue = deque(stuck)
    for rank in absent:
        for position in waits_for_rank.get(rank, ()):
            if position not in visited:
                visited.add(position)
                queue.append(position)
    while queue:
        position = queue.popleft()
        following = list(waits_for_operation.get(position, ()))
        for rank in operations[position].waiting:
            if rank not in ranks and rank in open_of_rank:
                ranks.add(rank)
                following.extend(waits_for_rank.get(rank, ()))
        for other in following:
            if other not in visited:
                visited.add(other)
                queue.append(other)
    return ranks


def _cycle(
    start: int, operations: tuple[OpenOperation, ...], open_of_rank: Mapping[int, list[int]]
) -> tuple[int, ...]:
    """Follow first edges from a rank without a path that ends, until a rank repeats."""
    path: list[int] = []
    position_of: dict[int, int] = {}
    rank = start
    while rank not in position_of:
        position_of[rank] = len(path)
        path.append(rank)
        operation = operations[open_of_rank[rank][0]]
        while not operation.missing:
            operation = operations[operation.earlier]
        rank = operation.missing[0]
    cycle = path[position_of[rank] :]
    first = cycle.index(min(cycle))
    return tuple(cycle[first:] + cycle[:first])
