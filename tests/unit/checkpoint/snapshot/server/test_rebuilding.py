"""Claims about rebuilds of lost shards: a new generation stops them, and may begin them again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import crc32c
import numpy as np
import pytest

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Bytes
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup, ShardLocation
from keepstep.checkpoint.snapshot.memory.messages import StripeBytes, Table
from keepstep.checkpoint.snapshot.server import rebuilding, snapshot_memory
from keepstep.checkpoint.snapshot.server.rebuilding import Rebuilder
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.transport import Identity
from tests.adaptive_timeouts import patient
from tests.unit.checkpoint.snapshot.server.sealed import open_memory, seal

LOST, RANK, NBYTES = SnapshotId(1, 4), 7, 4096
GROUP = ErasureGroup(generation=1, addresses=("a", "b", "c"), position=1, parity=1)
CONTENT = np.full(NBYTES, 5, np.uint8)
TABLE = (
    ShardLocation(
        rank=RANK, offset=0, nbytes=NBYTES, index_offset=4000, crc=crc32c.crc32c(CONTENT.data)
    ),
)


class Peers:
    """Stands for the connections to the group's nodes: each block arrives when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.receiving, self.let_go = threading.Semaphore(0), threading.Semaphore(0)
        self.interrupted = threading.Event()
        monkeypatch.setattr(rebuilding, "ServerConnections", lambda identity: self)
        monkeypatch.setattr(rebuilding, "send_request", lambda source, request: None)
        monkeypatch.setattr(rebuilding, "receive_head", self._receive_head)
        monkeypatch.setattr(rebuilding, "combine", self._combine)

    def get(self, address: str) -> str:
        return address

    def retain_only(self, addresses: Any) -> None:
        self.interrupted.clear()

    def interrupt(self) -> None:
        self.interrupted.set()

    def _receive_head(self, source: str, expected: type) -> tuple[Any, int]:
        if expected is Table:
            return Table(table=TABLE), 0
        return StripeBytes(table=None), NBYTES

    def _combine(
        self, row: object, sources: object, counts: object, target: Bytes, stop: threading.Event
    ) -> None:
        self.receiving.release()
        assert self.let_go.acquire(timeout=patient(60))
        if self.interrupted.is_set():
            raise SnapshotUnavailable("the connection was ended")
        target[...] = 5


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    return Peers(monkeypatch)


@pytest.fixture
def memory(peers: Peers) -> Iterator[SnapshotMemory]:
    memory = open_memory(2)
    yield memory
    memory.stop()
    memory.close()


@pytest.fixture
def rebuilder(peers: Peers, memory: SnapshotMemory) -> Iterator[Rebuilder]:
    rebuilder = Rebuilder(memory, Identity("node", b"s" * 32), lambda snapshot: None)
    yield rebuilder
    peers.let_go.release(9)
    rebuilder.close()


def begin(memory: SnapshotMemory, rebuilder: Rebuilder) -> None:
    memory.expect(LOST, [RANK])
    rebuilder.rebuild(LOST, GROUP, [1], [RANK])


def rebuilt(memory: SnapshotMemory) -> Bytes:
    while memory.is_pending(LOST, RANK):
        pass
    return memory.memory(LOST, RANK).bytes[:NBYTES]


def test_a_rebuild_that_a_new_generation_stopped_can_be_begun_again(
    peers: Peers,
    memory: SnapshotMemory,
    rebuilder: Rebuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_memory, "_PENDING_POLL_S", 0.001)
    begin(memory, rebuilder)
    assert peers.receiving.acquire(timeout=patient(60))
    rebuilder.stop()
    memory.open_generation(3)
    begin(memory, rebuilder)
    peers.let_go.release()  # The first one fails now; readers wait for the second one already.
    assert peers.receiving.acquire(timeout=patient(60))
    assert memory.is_pending(LOST, RANK)
    peers.let_go.release(9)
    assert (rebuilt(memory) == CONTENT).all()


def test_a_worker_gets_other_memory_than_a_rebuild_that_was_stopped_still_writes(
    peers: Peers, memory: SnapshotMemory, rebuilder: Rebuilder
) -> None:
    begin(memory, rebuilder)
    assert peers.receiving.acquire(timeout=patient(60))
    memory.open_generation(3)
    seal(memory, SnapshotId(3, 5), 0, {"w": 9}, commit=False)
    peers.let_go.release(9)
    assert (rebuilt(memory) == CONTENT).all()
    assert (memory.memory(SnapshotId(3, 5), 0).bytes[:NBYTES] == 9).all()


def test_a_shard_that_an_earlier_generation_rebuilt_is_not_refused(
    peers: Peers, memory: SnapshotMemory, rebuilder: Rebuilder
) -> None:
    peers.let_go.release(9)
    begin(memory, rebuilder)
    assert (rebuilt(memory) == CONTENT).all()
    rebuilder.stop()
    memory.open_generation(3)
    begin(memory, rebuilder)
    rebuilder._thread.submit(lambda: None).result(patient(60))  # It is through with the rebuild.
    assert (rebuilt(memory) == CONTENT).all()
