"""Measures what it costs snapshot servers to plan a checkpoint together.

`python ops/bench/server_planning.py --json [--quick]`. The last line is one JSON object.

224 tensors (7 layers, with AdamW's state) are sharded by rows over 4, 16 and 64 nodes of 8 ranks.
One process plays all nodes, each with the real planning of a snapshot server; what they send each
other is encoded as between servers, and counted without frames and handshakes.

For each number of nodes: `received_bytes` and `requests` are the mean and the most of a node when
it plans for the first time, `again_bytes` the mean when no rank's boxes have changed; `plan_s` is
the processor time of all nodes divided by their number, `again_s` likewise; `publish_bytes` what
the one that publishes receives. `alone_s` is the processor time of planning the whole checkpoint by
oneself, with all indexes at hand, as each server once did.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console

from keepstep.checkpoint.format.layout.boxes import ShardIndex
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.chunking import plan_chunks
from keepstep.checkpoint.snapshot.memory.messages import (
    SNAPSHOT_PROTOCOL,
    PersistTask,
    PlanReply,
    PlanRequest,
    RankHolder,
)
from keepstep.checkpoint.snapshot.server.plan_answers import PlanAnswers
from keepstep.checkpoint.snapshot.server.plan_exchange import PlanExchange
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory

sys.path.insert(0, str(Path(__file__).parents[2]))

from ops.bench.checkpoint_scale import Model

NODES = (4, 16, 64)
RANKS_PER_NODE = 8
LAYERS = 7


@dataclass
class Indexes:
    """A node's memory, of which planning reads the indexes only."""

    by_rank: dict[int, ShardIndex]

    def index(self, snapshot: SnapshotId, rank: int) -> ShardIndex:
        return self.by_rank[rank]


@dataclass
class Connection:
    """Connections of one node to another; counts what is received."""

    server: PlanAnswers
    requests: int = 0
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer_plan(self, request: PlanRequest) -> tuple[PlanReply, bytes | bytearray]:
        requests, replies = SNAPSHOT_PROTOCOL.requests, SNAPSHOT_PROTOCOL.replies
        arrived = requests.decode(requests.encode(request), "client")
        reply, payload = self.server.answer_plan(cast(PlanRequest, arrived))
        body = replies.encode(reply)
        with self.lock:
            self.requests += 1
            self.nbytes += len(body) + len(payload)
        return cast(PlanReply, replies.decode(body, "server")), payload

    def close(self) -> None:
        pass


class Node:
    """One node's planning, and its connections to the others."""

    def __init__(self, number: int, answers: list[PlanAnswers]) -> None:
        self.number = number
        self.answers = answers[number]
        self.connections = [Connection(other) for other in answers]
        self.exchange = PlanExchange(self.answers, lambda address: self.connections[int(address)])

    def task(self, attempt: str, step: int) -> PersistTask:
        holders = tuple(
            RankHolder(None if number == self.number else str(number), ranks_of(number))
            for number in range(len(self.connections))
        )
        return PersistTask("", SnapshotId(1, step), 1, attempt, holders)

    @property
    def received(self) -> tuple[int, int]:
        """Requests made and bytes received since the last time."""
        counts = [(connection.requests, connection.nbytes) for connection in self.connections]
        for connection in self.connections:
            connection.requests = connection.nbytes = 0
        return sum(requests for requests, _ in counts), sum(nbytes for _, nbytes in counts)


def ranks_of(node: int) -> tuple[int, ...]:
    return tuple(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))


def cpu_s(act: Callable[[], object]) -> float:
    begun_s = time.process_time()
    act()
    return time.process_time() - begun_s


def measure(model: Model, count: int) -> dict[str, Any]:
    ranks = count * RANKS_PER_NODE

    def index(rank: int) -> ShardIndex:
        return ShardIndex(0, tuple(model.entries(rank, ranks)), {"values": {"epoch": 1}})

    held = [Indexes({rank: index(rank) for rank in ranks_of(node)}) for node in range(count)]
    answers = [PlanAnswers(cast(SnapshotMemory, own)) for own in held]
    nodes = [Node(number, answers) for number in range(count)]

    def plan(attempt: str, step: int) -> None:
        for node in nodes:
            node.answers.shares.begin(attempt)
        with ThreadPoolExecutor(count) as pool:
            list(
                pool.map(
                    lambda node: node.exchange.plan(node.task(attempt, step), lambda: False), nodes
                )
            )

    plan_s = cpu_s(lambda: plan("first", 1)) / count
    first = [node.received for node in nodes]
    for own in held:
        own.by_rank = {rank: index(rank) for rank in own.by_rank}
    again_s = cpu_s(lambda: plan("again", 2)) / count
    again = [node.received for node in nodes]
    nodes[0].exchange.content(nodes[0].task("again", 2), lambda: False)
    _, publish_nbytes = nodes[0].received
    indexes = [own.by_rank[rank] for own in held for rank in sorted(own.by_rank)]
    return {
        "received_bytes": {
            "mean": round(statistics.mean(nbytes for _, nbytes in first)),
            "most": max(nbytes for _, nbytes in first),
        },
        "requests": {
            "mean": round(statistics.mean(requests for requests, _ in first)),
            "most": max(requests for requests, _ in first),
        },
        "plan_s": round(plan_s, 3),
        "again_bytes": round(statistics.mean(nbytes for _, nbytes in again)),
        "again_s": round(again_s, 3),
        "publish_bytes": publish_nbytes,
        "alone_s": round(cpu_s(lambda: plan_chunks(indexes)), 3),
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="Without 64 nodes.")
def main(as_json: bool, quick: bool) -> None:
    console = Console(stderr=as_json)
    model = Model.of_layers(LAYERS)
    results = {}
    for count in NODES[: 2 if quick else 3]:
        results[str(count)] = measure(model, count)
        console.print(count, results[str(count)])
    print(json.dumps({"tensors": len(model.tensors), "nodes": results}))


if __name__ == "__main__":
    main()
