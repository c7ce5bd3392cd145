"""Claims about the order in which snapshots are protected; the parity itself is tested on disk."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace

from keepstep.checkpoint.memory.erasure_group import ErasureGroup
from keepstep.checkpoint.memory.snapshot_table import SnapshotId
from keepstep.checkpoint.server.memory_budget import MemoryBudget
from keepstep.checkpoint.server.protection import Protection
from keepstep.transport import Identity
from tests.patience import patient
from tests.unit.checkpoint.server.sealed import open_memory

OLDER, NEWER = SnapshotId(1, 1), SnapshotId(1, 2)
GROUP = ErasureGroup(generation=1, addresses=("a",), position=0, parity=0)


def test_snapshot_of_a_generation_that_is_over_keeps_no_other_from_being_protected() -> None:
    protected: queue.SimpleQueue[SnapshotId] = queue.SimpleQueue()
    memory = open_memory()
    protection = Protection(memory, Identity("a", b"s" * 16), MemoryBudget(), protected.put)
    try:
        protection.open_generation(replace(GROUP, generation=2))
        # Its ranks sealed it before the generation opened; what they restored was checked first.
        protection.protect(OLDER)
        protection.protect(SnapshotId(2, 1))
        assert protected.get(timeout=patient(60)) == SnapshotId(2, 1)
    finally:
        protection.stop()
        protection.close()
        memory.close()


def test_newer_snapshot_is_waited_for_though_an_older_ones_protection_has_ended() -> None:
    completing: queue.SimpleQueue[SnapshotId] = queue.SimpleQueue()
    may_end = threading.Semaphore(0)

    def wait(snapshot: SnapshotId) -> None:
        completing.put(snapshot)
        assert may_end.acquire(timeout=patient(60))

    memory = open_memory()
    protection = Protection(memory, Identity("a", b"s" * 16), MemoryBudget(), wait)
    try:
        protection.open_generation(GROUP)
        protection.protect(OLDER)
        assert completing.get(timeout=patient(60)) == OLDER
        protection.protect(NEWER)
        may_end.release()
        # One thread protects all: when the newer one is at its end, the older one has ended.
        assert completing.get(timeout=patient(60)) == NEWER
        began_s = time.monotonic()
        protection.finish_protection(0.1)
        assert time.monotonic() - began_s >= 0.1
    finally:
        may_end.release(2)
        protection.stop()
        protection.close()
        memory.close()
