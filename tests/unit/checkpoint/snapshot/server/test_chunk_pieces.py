"""Claims about the chunks that a server assembles from the shards in its memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.format.stored.chunking import ChunkPlan, Piece, PlannedChunk, StoredTensor
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.server.chunk_pieces import ChunkPieces
from keepstep.checkpoint.snapshot.server.plan_exchange import NodePlan
from keepstep.checkpoint.snapshot.server.snapshot_memory import SnapshotMemory
from tests.adaptive_timeouts import patient
from tests.unit.checkpoint.snapshot.server.sealed import open_memory, seal_bytes

SNAPSHOT = SnapshotId(1, 1)
ROWS, COLUMNS = 8, 6
TENSORS = {
    key: np.random.default_rng(seed).integers(0, 256, (ROWS, COLUMNS), np.uint8)
    for seed, key in enumerate(("a", "b", "c"))
}
WHOLE = Box.whole((ROWS, COLUMNS))


@pytest.fixture
def pieces() -> Iterator[ChunkPieces]:
    """Two ranks have half of the rows of every tensor each, and rank 0 assembles them."""
    memory: SnapshotMemory = open_memory()
    halves = [Box((first, 0), (ROWS // 2, COLUMNS)) for first in (0, ROWS // 2)]
    for rank, half in enumerate(halves):
        entries = [
            Entry(
                key=key,
                dtype="uint8",
                global_shape=(ROWS, COLUMNS),
                box=half,
                byte_offset=number * half.size,
                nbytes=half.size,
            )
            for number, key in enumerate(TENSORS)
        ]
        content = b"".join(values[half.slices].tobytes() for values in TENSORS.values())
        seal_bytes(memory, SNAPSHOT, rank, entries, content, commit=False)
    stored = StoredTensor(
        dtype="uint8",
        shape=WHOLE.shape,
        chunk=WHOLE.shape,
        cell=WHOLE.shape,
        is_packed=True,
    )
    parts = tuple(Piece(rank, half) for rank, half in enumerate(halves))
    chunks = tuple(PlannedChunk(key, (0, 0), WHOLE, parts) for key in TENSORS)
    plan = NodePlan(
        ranks=(0, 1), own=(0, 1), chunks=ChunkPlan(dict.fromkeys(TENSORS, stored), (chunks, ()))
    )
    yield ChunkPieces(memory, SNAPSHOT, {0: None, 1: None}, plan, _no_other_node)
    memory.close()


def _no_other_node(address: str) -> SnapshotClient:
    raise AssertionError(f"everything is in this node's memory, nothing at {address}")


def test_chunks_are_assembled_from_several_ranks(pieces: ChunkPieces) -> None:
    for key, values in TENSORS.items():
        assert np.array_equal(pieces.read(key, WHOLE).reshape(values.shape), values)


def test_a_chunk_stays_while_other_threads_read_others(pieces: ChunkPieces) -> None:
    all_have_read = threading.Barrier(len(TENSORS))

    def is_right(key: str) -> bool:
        data = pieces.read(key, WHOLE)
        all_have_read.wait(patient(60))
        return np.array_equal(data.reshape(ROWS, COLUMNS), TENSORS[key])

    with ThreadPoolExecutor(len(TENSORS)) as threads:
        assert all(threads.map(is_right, TENSORS))
