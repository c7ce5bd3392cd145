"""Claims about storing snapshots from memory: which attempt writes, and what it keeps in memory."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError, SnapshotUnavailable
from keepstep.checkpoint.format.layout.retention import Retention
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.housekeeping import remove
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.snapshot.memory.messages import (
    AlreadyStored,
    Persisted,
    PersistFailed,
    PersistTask,
    Published,
    PublishFailed,
    RankHolder,
    ServerEvent,
)
from keepstep.checkpoint.snapshot.server import persistence
from keepstep.checkpoint.snapshot.server.persistence import Persistence
from keepstep.checkpoint.snapshot.server.plan_outbox import PlanOutbox
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from keepstep.transport import Identity
from tests.adaptive_timeouts import patient
from tests.unit.checkpoint.snapshot.server.sealed import open_memory, seal

FIRST, SECOND = SnapshotId(1, 1), SnapshotId(1, 2)


class HeldStorage:
    """A storage whose writes wait until they are let go."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.is_writing, self.let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self.is_writing.set()
        assert self.let_go.wait(patient(60))
        self.storage.write(name, pieces)


class Node:
    """One node's memory with two committed snapshots' worth of state, and what stores it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        self.storage = HeldStorage(open_storage(self.url))
        monkeypatch.setattr(persistence, "open_storage", lambda url: self.storage)
        self.memory: SnapshotMemory = open_memory()
        seal(self.memory, FIRST, 0, {"model/w": 1, "model/v": 2})
        self.events: queue.Queue[ServerEvent] = queue.Queue()
        self.persistence = Persistence(
            self.memory, PlanOutbox(), Identity("node", b"s" * 32), 0, self.events.put
        )

    def task(self, attempt: str) -> PersistTask:
        return PersistTask(self.url, FIRST, FIRST.generation, attempt, (RankHolder(None, (0,)),))

    def next_event(self) -> ServerEvent:
        return self.events.get(timeout=patient(60))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node(monkeypatch)
    yield node
    node.storage.let_go.set()
    node.persistence.close()
    node.memory.close()


def test_the_next_attempt_stops_the_one_before(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is a chunk of its own here, so that the attempt has a chunk left to begin."""
    monkeypatch.setattr("keepstep.checkpoint.format.stored.chunking.PACKED_NBYTES", 1)
    monkeypatch.setattr("keepstep.checkpoint.format.stored.writer.PARALLEL_WRITES", 1)
    node.persistence.start(node.task("a"), 0)
    assert node.storage.is_writing.wait(patient(60))
    node.persistence.start(node.task("b"), 0)
    node.storage.let_go.set()
    ended = node.next_event()
    assert isinstance(ended, PersistFailed)
    assert (ended.attempt, "given up" in ended.reason) == ("a", True)
    written = node.next_event()
    assert isinstance(written, Persisted)
    assert written.attempt == "b"
    node.persistence.publish(node.task("b"), [written.listing])
    assert isinstance(node.next_event(), Published)
    source = StoredCheckpoint.open(open_storage(node.url))
    assert source.directory.endswith("/attempt-b")
    source.verify()


def test_tensors_are_compressed_if_the_task_says_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.checkpoint.format.stored.chunking.PACKED_NBYTES", 1)
    node.storage.let_go.set()
    # The plan of one attempt is not that of the next.
    for compression in (None, "zstd"):
        task = replace(node.task(f"a-{compression}".lower()), compression=compression)
        node.persistence.start(task, 0)
        written = node.next_event()
        assert isinstance(written, Persisted)
        node.persistence.publish(task, [written.listing])
        assert isinstance(node.next_event(), Published)
        source = StoredCheckpoint.open(open_storage(node.url))
        source.verify()
        assert {tensor.compression for tensor in source.stored_tensors.values()} == {compression}
        remove(open_storage(node.url), source.stored, now=0.0)


def test_older_checkpoints_are_removed_once_one_is_published(
    node: Node,
) -> None:
    """Those that are later stay: they may be damaged, or of a launch that went on from them."""
    node.storage.let_go.set()
    retention = Retention(last=2, every=4)
    checkpoint.save(node.url, {"w": torch.zeros(1)}, step=9)
    for step in (3, 4, 5, 6, 7):
        snapshot = SnapshotId(1, step)
        seal(node.memory, snapshot, 0, {"model/w": step, "model/v": 2})
        task = replace(node.task(f"a-{step}"), snapshot=snapshot, retention=retention)
        node.persistence.start(task, 0)
        written = node.next_event()
        assert isinstance(written, Persisted)
        node.persistence.publish(task, [written.listing])
        assert isinstance(node.next_event(), Published)
    node.persistence.close()
    assert [stored.step for stored in list_steps(open_storage(node.url))] == [9, 7, 6, 4]


def test_a_checkpoint_is_published_though_older_ones_cannot_be_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(url: str) -> None:
        raise CheckpointError("the storage does not list")

    monkeypatch.setattr(persistence, "list_steps", fail)
    node.storage.let_go.set()
    task = replace(node.task("a"), retention=Retention(last=1))
    node.persistence.start(task, 0)
    written = node.next_event()
    assert isinstance(written, Persisted)
    node.persistence.publish(task, [written.listing])
    assert isinstance(node.next_event(), Published)
    node.persistence.close()
    assert "the storage does not list" in caplog.text


def test_an_attempt_that_is_over_is_stopped_and_others_are_not(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.checkpoint.format.stored.chunking.PACKED_NBYTES", 1)
    monkeypatch.setattr("keepstep.checkpoint.format.stored.writer.PARALLEL_WRITES", 1)
    for over, kind in (("a", PersistFailed), ("x", Persisted)):
        node.storage.is_writing.clear()
        node.storage.let_go.clear()
        node.persistence.start(node.task("a"), 0)
        assert node.storage.is_writing.wait(patient(60))
        node.persistence.end(over)
        node.storage.let_go.set()
        assert isinstance(node.next_event(), kind)


def test_a_snapshot_is_kept_until_its_attempt_is_over(node: Node) -> None:
    """Other holders may need pieces of it when this one's part is written."""
    node.storage.let_go.set()
    node.persistence.start(node.task("a"), 0)
    assert isinstance(node.next_event(), Persisted)
    seal(node.memory, SECOND, 0, {"model/w": 3, "model/v": 4})
    assert node.memory.memory(FIRST, 0).bytes[0] == 1
    node.persistence.end("a")
    with pytest.raises(SnapshotUnavailable, match="not held here"):
        node.memory.memory(FIRST, 0)
    node.persistence.end("a")
    assert node.memory.memory(SECOND, 0).bytes[0] == 3


def test_memory_that_an_ended_attempt_still_reads_is_not_freed(node: Node) -> None:
    node.persistence.start(node.task("a"), 0)
    assert node.storage.is_writing.wait(patient(60))
    node.persistence.stop()
    seal(node.memory, SECOND, 0, {"model/w": 3, "model/v": 4})
    assert node.memory.memory(FIRST, 0).bytes[0] == 1
    node.storage.let_go.set()
    node.next_event()
    with pytest.raises(SnapshotUnavailable, match="not held here"):
        node.memory.memory(FIRST, 0)


def test_memory_that_an_ended_attempt_has_not_begun_to_read_is_freed(node: Node) -> None:
    """Storage that hangs kept one more snapshot with each attempt."""
    node.persistence.start(node.task("a"), 0)
    assert node.storage.is_writing.wait(patient(60))
    seal(node.memory, SECOND, 0, {"model/w": 3, "model/v": 4})
    node.persistence.start(replace(node.task("b"), snapshot=SECOND), 0)
    node.persistence.end("b")
    seal(node.memory, SnapshotId(SECOND.generation, SECOND.step + 1), 0, {"model/w": 5})
    with pytest.raises(SnapshotUnavailable, match="not held here"):
        node.memory.memory(SECOND, 0)
    assert node.memory.memory(FIRST, 0).bytes[0] == 1
    node.storage.let_go.set()
    node.next_event()


@pytest.fixture
def committed(node: Node) -> Persisted:
    """The listing of a checkpoint that a run has committed."""
    node.storage.let_go.set()
    node.persistence.start(node.task("7-ab"), 0)
    written = node.next_event()
    assert isinstance(written, Persisted)
    node.persistence.publish(node.task("7-ab"), [written.listing])
    assert isinstance(node.next_event(), Published)
    return written


def test_a_checkpoint_that_the_same_run_has_committed_is_stored_and_no_failure(
    node: Node, committed: Persisted
) -> None:
    """A leader may be lost between the manifest and the coordinator; the next one asks again."""
    node.persistence.start(node.task("9-ab"), 0)
    assert node.next_event() == AlreadyStored(snapshot=FIRST, attempt="9-ab")
    node.persistence.publish(node.task("9-ab"), [committed.listing])
    assert isinstance(node.next_event(), Published)
    assert StoredCheckpoint.open(open_storage(node.url)).directory.endswith("/attempt-7-ab")


def test_a_checkpoint_that_another_job_has_committed_is_not_taken_for_this_ones(
    node: Node, committed: Persisted
) -> None:
    node.persistence.start(node.task("7-cd"), 0)
    refused = node.next_event()
    assert isinstance(refused, PersistFailed)
    assert "step" in refused.reason
    node.persistence.publish(node.task("7-cd"), [committed.listing])
    assert isinstance(node.next_event(), PublishFailed)
