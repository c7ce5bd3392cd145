"""Makes a snapshot server's memory with sealed shards in it, without processes or sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from keepstep.checkpoint.format.layout.boxes import Box, Entry, encode_boxes, encode_index
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.checkpoint.snapshot.server.memory_budget import MemoryBudget
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory

TENSOR_NBYTES = 4096


def open_memory(
    generation: int = 1, on_retained: Callable[[set[SnapshotId]], None] = lambda snapshots: None
) -> SnapshotMemory:
    """Return an empty memory in a generation."""
    memory = SnapshotMemory(MemoryBudget(), on_retained)
    memory.open_generation(generation)
    return memory


def seal(
    memory: SnapshotMemory,
    snapshot: SnapshotId,
    rank: int,
    values: Mapping[str, int],
    *,
    commit: bool = True,
) -> None:
    """Seal a shard with one tensor of bytes for each value, and commit the snapshot."""
    entries = [
        Entry(
            key=key,
            dtype="uint8",
            global_shape=(TENSOR_NBYTES,),
            box=Box.whole((TENSOR_NBYTES,)),
            byte_offset=number * TENSOR_NBYTES,
            nbytes=TENSOR_NBYTES,
        )
        for number, key in enumerate(values)
    ]
    content = b"".join(np.full(TENSOR_NBYTES, value, np.uint8) for value in values.values())
    seal_bytes(memory, snapshot, rank, entries, content, commit=commit)


def seal_bytes(
    memory: SnapshotMemory,
    snapshot: SnapshotId,
    rank: int,
    entries: Sequence[Entry],
    content: bytes,
    *,
    commit: bool = True,
) -> None:
    """Seal a shard of these bytes, and commit the snapshot."""
    index = encode_index(encode_boxes(len(content), entries), {})
    nbytes = len(content) + len(index)
    given = memory.begin(snapshot, rank, nbytes, (), discard_uncommitted=False)
    assert given.descriptor is not None
    arena = Arena.map(given.descriptor, given.capacity, writable=True)
    arena.buffer[:nbytes] = content + index
    arena.close()
    memory.seal(snapshot, rank, len(content), len(index))
    if commit:
        memory.commit(snapshot)
