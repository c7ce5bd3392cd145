"""Claims about the order in which snapshots are protected; the parity itself is tested on disk."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from keepstep.checkpoint.errors import CheckpointError, SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup
from keepstep.checkpoint.snapshot.server import blocks, parity_memory
from keepstep.checkpoint.snapshot.server import protection as protection_module
from keepstep.checkpoint.snapshot.server.blocks import ServerConnections, SnapshotIncomplete
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.checkpoint.snapshot.server.protection import Protection
from keepstep.transport import Identity, PeerUnavailable
from tests.adaptive_timeouts import patient
from tests.unit.checkpoint.snapshot.server.sealed import open_memory, seal

OLDER, NEWER = SnapshotId(1, 1), SnapshotId(1, 2)
GROUP = ErasureGroup(generation=1, addresses=("a",), position=0, parity=0)
PAIR = ErasureGroup(generation=1, addresses=("a", "b"), position=0, parity=1)


@contextmanager
def opened(on_protected: Callable[[SnapshotId], None]) -> Iterator[Protection]:
    """Open a node's protection; at the end stop it, and free its memory."""
    memory = open_memory()
    protection = Protection(memory, Identity("a", b"s" * 16), MemoryBudget(), on_protected)
    try:
        yield protection
    finally:
        protection.stop()
        protection.close()
        memory.close()


def compute_nothing(protection: Protection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take parity as computed, without a peer."""
    monkeypatch.setattr(protection, "_compute_shard_table", lambda snapshot: ())
    monkeypatch.setattr(protection, "_encode", lambda *_: None)


def test_snapshot_is_protected_at_once_where_nothing_is_to_be_computed() -> None:
    protected: list[SnapshotId] = []
    with opened(protected.append) as protection:
        protection.open_generation(GROUP)
        protection.protect(OLDER)
        assert protected == [OLDER]
        assert protection.is_protected(OLDER)


def test_snapshot_of_a_generation_that_is_over_keeps_no_other_from_being_protected() -> None:
    protected: queue.SimpleQueue[SnapshotId] = queue.SimpleQueue()
    with opened(protected.put) as protection:
        protection.open_generation(replace(GROUP, generation=2))
        # Its ranks sealed it before the generation opened; what they restored was checked first.
        protection.protect(OLDER)
        protection.protect(SnapshotId(2, 1))
        assert protected.get(timeout=patient(60)) == SnapshotId(2, 1)


def test_newer_snapshot_is_waited_for_though_an_older_ones_protection_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completing: queue.SimpleQueue[SnapshotId] = queue.SimpleQueue()
    may_end = threading.Semaphore(0)

    def wait(snapshot: SnapshotId) -> None:
        completing.put(snapshot)
        assert may_end.acquire(timeout=patient(60))

    with opened(wait) as protection:
        compute_nothing(protection, monkeypatch)
        try:
            protection.open_generation(PAIR)
            protection.protect(OLDER)
            assert completing.get(timeout=patient(60)) == OLDER
            protection.protect(NEWER)
            may_end.release()
            # One thread protects all: when the newer one is at its end, the older one has ended.
            assert completing.get(timeout=patient(60)) == NEWER
            began_s = time.monotonic()
            protection.finish_protection({OLDER, NEWER}, 0.1)
            assert time.monotonic() - began_s >= 0.1
        finally:
            may_end.release(2)


@pytest.mark.parametrize("lasts", [True, False], ids=["lasting", "passing"])
def test_what_stays_in_the_way_is_told_once_and_a_peer_that_is_gone_not_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, lasts: bool
) -> None:
    """Agents find out about the peer; anything else would go on without a word."""
    protected: queue.SimpleQueue[SnapshotId] = queue.SimpleQueue()
    gone = SnapshotUnavailable("b: gone")
    gone.__cause__ = PeerUnavailable("b: connection refused")
    obstacles = iter([gone, *map(SnapshotUnavailable, ("b: no room", "b: no room", "b: damaged"))])

    def publish(*_: object) -> bool:
        obstacle = next(obstacles, None)
        if obstacle is not None:
            raise obstacle
        return True

    monkeypatch.setattr(protection_module, "_RETRY_S", 0.001)
    monkeypatch.setattr(protection_module, "_OBSTACLE_LASTS_S", 0.0 if lasts else 1e9)
    with opened(protected.put) as protection:
        compute_nothing(protection, monkeypatch)
        monkeypatch.setattr(protection._parity, "publish", publish)
        monkeypatch.setattr(protection._parity, "own_table", lambda snapshot: ())
        protection.open_generation(PAIR)
        protection.protect(OLDER)
        assert protected.get(timeout=patient(60)) == OLDER
    told = [
        "step 1 is not protected yet, trying again: b: no room",
        "step 1 is not protected yet, trying again: b: damaged",
    ]
    assert caplog.messages == (told if lasts else [])


def test_snapshot_is_protected_when_what_was_lacking_is_there_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Chaos, seed 302: it never was, so that no step was committed any more."""
    protected: queue.SimpleQueue[SnapshotId] = queue.SimpleQueue()
    shortages = iter([CheckpointError("parity needs 1 MiB"), OSError("no memory")])
    starts = iter([RuntimeError("can't start new thread")])

    def encode(*_: object) -> None:
        shortage = next(shortages, None)
        if shortage is not None:
            raise shortage

    def compute_table(_: SnapshotId) -> tuple[()]:
        for failure in starts:
            raise failure
        return ()

    monkeypatch.setattr(protection_module, "_RETRY_S", 0.001)
    monkeypatch.setattr(protection_module, "_OBSTACLE_LASTS_S", 0.0)
    with opened(protected.put) as protection:
        monkeypatch.setattr(protection, "_compute_shard_table", compute_table)
        monkeypatch.setattr(protection, "_encode", encode)
        protection.open_generation(PAIR)
        protection.protect(OLDER)
        assert protected.get(timeout=patient(60)) == OLDER
    assert caplog.messages == [
        'step 1 is not protected yet, trying again: RuntimeError("can\'t start new thread")',
        "step 1 is not protected yet, trying again: parity needs 1 MiB",
        "step 1 is not protected yet, trying again: no memory",
    ]


def test_a_connection_that_was_interrupted_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt of each generation failed where the members stayed the same."""

    class Ended:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def interrupt(self) -> None:
            self.calls.append("interrupt")

        def close(self) -> None:
            self.calls.append("close")

    monkeypatch.setattr(blocks, "connect", lambda *_: Ended())
    connections = ServerConnections(Identity("a", b"s" * 32))
    first = connections.get("tcp:b:1")
    connections.retain_only(["tcp:b:1"])
    assert connections.get("tcp:b:1") is first
    connections.interrupt()
    # What still uses it fails by it.
    assert connections.get("tcp:b:1") is first
    connections.retain_only(["tcp:b:1"])
    assert first.calls == ["interrupt", "close"]
    assert connections.get("tcp:b:1") is not first


def test_shard_that_was_given_up_is_no_changed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step that not all ranks had sealed, damaged memory was reported falsely."""
    monkeypatch.setattr(Protection, "_encode", lambda *_: None)
    protected: queue.SimpleQueue[SnapshotId] = queue.SimpleQueue()
    memory = open_memory()
    protection = Protection(memory, Identity("a", b"s" * 16), MemoryBudget(), protected.put)
    try:
        protection.open_generation(PAIR)
        for rank in (0, 1):
            seal(memory, OLDER, rank, {"w": rank}, commit=False)
        protection.protect(OLDER)
        assert protected.get(timeout=patient(60)) == OLDER
        assert protection.is_intact(OLDER)
        assert protection.is_complete(OLDER)
        memory.begin(NEWER, 1, 1, (), discard_uncommitted=True)
        assert [shard.rank for shard in memory.own_shards(OLDER)] == [0]
        assert protection.is_intact(OLDER)
        assert not protection.is_complete(OLDER)
        memory.memory(OLDER, 0).buffer[0] ^= 1
        assert not protection.is_intact(OLDER)
    finally:
        protection.stop()
        protection.close()
        memory.close()


def hold_table(
    protection: Protection, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Return what tells that a table of shards is being computed, and what lets that end."""
    began, may_end = threading.Event(), threading.Event()

    def compute(snapshot: SnapshotId) -> tuple[()]:
        began.set()
        may_end.wait()
        return ()

    compute_nothing(protection, monkeypatch)
    monkeypatch.setattr(protection, "_compute_shard_table", compute)
    return began, may_end


def test_what_is_sealed_at_the_end_of_a_generation_is_given_to_others_once_it_is_summed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its table is computed, it is not taken for a snapshot that was never sealed."""
    monkeypatch.setattr(parity_memory, "_ANSWER_TIMEOUT_S", patient(600))
    with ThreadPoolExecutor(2) as pool, opened(lambda _: None) as protection:
        began, may_end = hold_table(protection, monkeypatch)
        protection.open_generation(PAIR)
        protection.protect(OLDER)
        began.wait()
        try:
            ask = protection._parity._wait_for_own_table
            sealed, unsealed = pool.submit(ask, OLDER), pool.submit(ask, NEWER)
            protection.finish_protection({OLDER}, 0)
            with pytest.raises(SnapshotIncomplete):
                unsealed.result(patient(60))
        finally:
            may_end.set()
        assert sealed.result(patient(60)) == ()


def test_nobody_is_told_of_a_snapshot_that_a_peer_has_not_sealed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = queue.SimpleQueue[None]()

    def encode(*_: object) -> None:
        tries.put(None)
        raise SnapshotIncomplete("step 1 was not sealed here before its generation ended")

    monkeypatch.setattr(protection_module, "_RETRY_S", 0.001)
    with opened(lambda _: None) as protection:
        compute_nothing(protection, monkeypatch)
        monkeypatch.setattr(protection, "_encode", encode)
        monkeypatch.setattr(protection._parity, "own_table", lambda snapshot: ())
        protection.open_generation(PAIR)
        protection.protect(OLDER)
        for _ in range(3):
            tries.get(timeout=patient(60))
    assert caplog.messages == []


def test_a_table_of_shards_that_are_taken_again_is_not_given_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes were those of the first copy, or of both; peers computed parity of them."""
    with opened(lambda _: None) as protection:
        began, may_end = hold_table(protection, monkeypatch)
        protection.open_generation(PAIR)
        protection.protect(OLDER)
        began.wait()
        protection.retain_only(())
        may_end.set()
        protection.finish_protection({OLDER}, patient(20))
        assert protection._parity.own_table(OLDER) is None
        assert not protection.is_protected(OLDER)
