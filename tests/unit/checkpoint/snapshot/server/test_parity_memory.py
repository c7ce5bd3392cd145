"""Claims about parity: it counts only while the snapshot and the generation that it is of last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.memory.erasure_group import ErasureGroup, ShardLocation
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.checkpoint.snapshot.server.parity_memory import ParityMemory, SnapshotParity
from tests.unit.checkpoint.snapshot.server.sealed import open_memory

SNAPSHOT = SnapshotId(1, 1)
GROUP = ErasureGroup(generation=1, addresses=("a", "b", "c"), position=0, parity=1)
TABLE = (ShardLocation(rank=0, offset=0, nbytes=10, index_offset=8, crc=1),)


@pytest.fixture
def parity_memory() -> Iterator[ParityMemory]:
    memory = open_memory()
    parity_memory = ParityMemory(memory, MemoryBudget())
    parity_memory.open_generation(GROUP)
    parity_memory.set_own_table(SNAPSHOT, TABLE)
    yield parity_memory
    parity_memory.close()
    memory.close()


def encoded(parity_memory: ParityMemory) -> SnapshotParity:
    """Return parity of the snapshot as it is when all blocks have been combined."""
    return SnapshotParity(GROUP, blocks={0: (parity_memory.take_buffer(100), 100)})


def test_complete_parity_counts(parity_memory: ParityMemory) -> None:
    assert parity_memory.publish(SNAPSHOT, encoded(parity_memory))
    assert parity_memory.is_protected(SNAPSHOT)


TOO_LATE: dict[str, Callable[[ParityMemory], object]] = {
    "the next generation": lambda p: p.open_generation(replace(GROUP, generation=2)),
    "another group": lambda p: p.open_generation(replace(GROUP, addresses=("a", "b", "d"))),
    "the end of the server": lambda p: p.stop(),
    "the snapshot was given up": lambda p: p.retain_only(()),
}


@pytest.mark.parametrize("event", TOO_LATE)
def test_parity_that_is_complete_too_late_does_not_count(
    parity_memory: ParityMemory, event: str
) -> None:
    parity = encoded(parity_memory)
    TOO_LATE[event](parity_memory)
    assert not parity_memory.publish(SNAPSHOT, parity)
    assert not parity_memory.is_protected(SNAPSHOT)
    parity_memory.release(parity)


def test_parity_is_refused_before_the_node_runs_out_of_memory() -> None:
    memory = open_memory()
    parity_memory = ParityMemory(memory, MemoryBudget(lambda: 2**27))
    first = parity_memory.take_buffer(2**25)
    with pytest.raises(CheckpointError, match="parity needs 64 MiB, which the node does not have"):
        parity_memory.take_buffer(2**26)
    first.close()
    memory.close()
