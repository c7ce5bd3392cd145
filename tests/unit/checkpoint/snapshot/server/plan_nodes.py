"""Plays the snapshot servers of several nodes, as far as they plan checkpoints, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.boxes import Entry, Json, ShardIndex
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.messages import (
    SNAPSHOT_PROTOCOL,
    PersistTask,
    PlanBytes,
    PlanPending,
    RankHolder,
    ReadPlan,
)
from keepstep.checkpoint.snapshot.server.plan_exchange import (
    NodePlan,
    PlanExchange,
    PublishedContent,
)
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory


@dataclass
class Indexes:
    """A node's memory, of which planning reads the indexes only."""

    by_rank: dict[int, ShardIndex]

    def index(self, snapshot: SnapshotId, rank: int) -> ShardIndex:
        if rank not in self.by_rank:
            raise SnapshotUnavailable(f"rank {rank}'s part is not held here")
        return self.by_rank[rank]


@dataclass
class Traffic:
    """The messages that one node has received from others."""

    requests: int = 0
    pending: int = 0
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, reply: PlanBytes | PlanPending, nbytes: int) -> None:
        with self.lock:
            self.requests += 1
            self.pending += isinstance(reply, PlanPending)
            self.nbytes += nbytes


@dataclass
class Connection:
    """A connection that encodes what it carries as a real one does."""

    server: PlanOutbox
    traffic: Traffic

    def read_plan(self, request: ReadPlan) -> bytes | None:
        requests, replies = SNAPSHOT_PROTOCOL.requests, SNAPSHOT_PROTOCOL.replies
        arrived = requests.decode(requests.encode(request), "client")
        message = self.server.read_plan(cast(ReadPlan, arrived))
        reply = PlanPending() if message is None else PlanBytes()
        self.traffic.add(reply, len(replies.encode(reply)) + len(message or b""))
        return message

    def close(self) -> None:
        pass


class Nodes:
    """Nodes that hold the shards of some ranks each.

    Args:
        ranks: the ranks of each node.
        indexes: what each rank holds.

    Attributes:
        lost: the nodes that do not answer.
        traffic: what each node has received from others.
        published: what a node that holds nothing has received.
    """

    def __init__(self, ranks: Sequence[Sequence[int]], indexes: Mapping[int, ShardIndex]) -> None:
        self.held = [Indexes({}) for _ in ranks]
        self.step = 0
        self.take(ranks, indexes)
        self.outboxes = [PlanOutbox() for _ in ranks]
        self.traffic = [Traffic() for _ in ranks]
        self.published = Traffic()
        self.lost: set[int] = set()
        self.exchanges = [self._exchange(node) for node in range(len(self.ranks))]

    def take(self, ranks: Sequence[Sequence[int]], indexes: Mapping[int, ShardIndex]) -> None:
        """Take the next snapshot, of ranks that may be on other nodes now."""
        self.step += 1
        self.ranks = [tuple(own) for own in ranks]
        for held, own in zip(self.held, self.ranks, strict=True):
            held.by_rank = {rank: indexes[rank] for rank in own}

    def _exchange(self, node: int) -> PlanExchange:
        return exchange_of(self.held[node], self.outboxes[node], self._connect(self.traffic[node]))

    def _connect(self, traffic: Traffic) -> Callable[[str], Connection]:
        def connect(address: str) -> Connection:
            peer = int(address)
            if peer in self.lost:
                raise SnapshotUnavailable(f"node {peer} is gone")
            return Connection(self.outboxes[peer], traffic)

        return connect

    def task(self, node: int | None, attempt: str) -> PersistTask:
        """Return the task as a node gets it; None is one that holds nothing."""
        holders = tuple(
            RankHolder(None if number == node else str(number), own)
            for number, own in enumerate(self.ranks)
        )
        return PersistTask("memory://", SnapshotId(1, self.step), 1, attempt, holders)

    def plan_one(self, node: int, attempt: str, stop: threading.Event | None = None) -> NodePlan:
        """Return what a node's ranks write; the others have to plan as well."""
        self.outboxes[node].begin(attempt)
        stop = stop or threading.Event()
        return self.exchanges[node].plan(self.task(node, attempt), stop.is_set)

    def plan(self, attempt: str) -> list[NodePlan]:
        """Return what each node's ranks write, planned by all at once."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(lambda node: self.plan_one(node, attempt), range(len(self.ranks))))

    def content(self, attempt: str) -> PublishedContent:
        """Return what a node that holds nothing publishes."""
        exchange = exchange_of(Indexes({}), PlanOutbox(), self._connect(self.published))
        return exchange.content(self.task(None, attempt), lambda: False)


def exchange_of(
    held: Indexes, outbox: PlanOutbox, connect: Callable[[str], object]
) -> PlanExchange:
    """Return the planning of a server with these parts."""
    return PlanExchange(
        cast(SnapshotMemory, held), outbox, cast(Callable[[str], SnapshotClient], connect)
    )


def index_of(entries: Sequence[Entry], documents: Mapping[str, Json] | None = None) -> ShardIndex:
    """Return an index of these entries."""
    return ShardIndex(sum(entry.nbytes for entry in entries), tuple(entries), documents or {})
