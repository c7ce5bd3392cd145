"""Claims about the memory that a node can still give: granted buffers count."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from keepstep.checkpoint.errors import MemoryShort, SnapshotUnavailable
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.server import snapshot_memory
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory

MIB = 2**20
FREE_NBYTES = 1024 * MIB


def test_what_was_granted_and_not_written_yet_is_not_granted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four ranks ask for 70 % of what is free: one of them gets it."""
    monkeypatch.setattr(snapshot_memory, "_MEMORY_WAIT_S", 0.0)
    memory = SnapshotMemory(MemoryBudget(lambda: FREE_NBYTES), lambda snapshots: None)
    memory.open_generation(1)
    granted = 0
    for rank in range(4):
        try:
            buffer = memory.begin(
                SnapshotId(1, 1), rank, FREE_NBYTES * 7 // 10, (), discard_uncommitted=False
            )
        except MemoryShort as error:
            assert "307 MiB left" in str(error)  # noqa: PT017 - three of four are refused
            continue
        assert buffer.descriptor is not None
        granted += 1
    memory.close()
    assert granted == 1


class SlowlyFreed:
    """Free memory: too little at the first request, enough from then on."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return MIB if self.asked == 1 else FREE_NBYTES


def begin(memory: SnapshotMemory) -> None:
    given = memory.begin(SnapshotId(2, 1), 0, MIB, (), discard_uncommitted=False)
    assert given.descriptor is not None
    os.close(given.descriptor)


def adopt(memory: SnapshotMemory, is_over: Callable[[], bool] = lambda: False) -> None:
    assert memory.adopt(SnapshotId(1, 1), 7, MIB, is_over).nbytes >= MIB


@pytest.mark.parametrize("take", [begin, adopt])
def test_memory_that_others_have_taken_is_waited_for(
    take: Callable[[SnapshotMemory], None],
) -> None:
    """Chaos, seed 302: each generation failed to rebuild a shard until no restart was left."""
    free = SlowlyFreed()
    memory = SnapshotMemory(MemoryBudget(free), lambda snapshots: None)
    memory.open_generation(2)
    take(memory)
    assert free.asked == 2
    memory.close()


def test_nobody_waits_for_memory_for_a_shard_that_is_not_wanted_any_more() -> None:
    asked = [False, False, True]
    memory = SnapshotMemory(MemoryBudget(lambda: MIB), lambda snapshots: None)
    memory.open_generation(2)
    with pytest.raises(MemoryShort):
        adopt(memory, lambda: asked.pop(0))
    assert not asked
    memory.close()


def test_nobody_waits_for_memory_in_a_generation_that_is_over() -> None:
    openings: list[threading.Thread] = []

    def too_little() -> int:
        # It gets the memory's lock once who asks has found too little, and waits.
        if not openings:
            openings.append(threading.Thread(target=memory.open_generation, args=(3,)))
            openings[0].start()
        return MIB

    memory = SnapshotMemory(MemoryBudget(too_little), lambda snapshots: None)
    memory.open_generation(2)
    with pytest.raises(SnapshotUnavailable, match="it is over"):
        begin(memory)
    openings[0].join()
    memory.close()


def test_what_is_written_is_counted_by_the_system_alone() -> None:
    budget = MemoryBudget(lambda: FREE_NBYTES)
    arena = budget.create(8 * MIB)
    with budget.admission() as left:
        assert left() == FREE_NBYTES - 8 * MIB
    arena.bytes[: 3 * MIB] = 1
    with budget.admission() as left:
        assert left() == FREE_NBYTES - 5 * MIB
    arena.close()
    with budget.admission() as left:
        assert left() == FREE_NBYTES


def test_system_is_not_asked_for_memory_that_a_snapshot_does_not_need() -> None:
    """A rank's third snapshot is given the buffer of its first, at a time when nothing is left."""
    left = [FREE_NBYTES, FREE_NBYTES]
    memory = SnapshotMemory(MemoryBudget(left.pop), lambda snapshots: None)
    memory.open_generation(1)
    buffers = []
    for step in (1, 2, 3):
        snapshot = SnapshotId(1, step)
        given = memory.begin(snapshot, 0, MIB, (), discard_uncommitted=False)
        assert given.descriptor is not None
        os.close(given.descriptor)
        buffers.append(given.buffer)
        memory.seal(snapshot, 0, 0, 0)
        memory.commit(snapshot)
    memory.close()
    assert buffers[2] == buffers[0] != buffers[1]
    assert left == []
