"""Claims about large reads past the page cache: the same bytes, and damage is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored import cell_reads
from keepstep.checkpoint.format.stored.chunking import plan_chunks
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.transfer_memory import BLOCK_NBYTES
from keepstep.checkpoint.format.stored.writer import publish, write_part

SHAPE = (1536, 1024)
VALUES = np.random.default_rng(3).integers(0, 256, (*SHAPE, 4), np.uint8)


@pytest.fixture
def source(tmp_path: Path) -> StoredCheckpoint:
    """A checkpoint of one tensor of 6 MiB, whose cells begin at no multiple of a block."""
    entry = Entry(
        key="w", dtype="float32", global_shape=SHAPE, box=Box.whole(SHAPE), byte_offset=0,
        nbytes=VALUES.nbytes,
    )  # fmt: skip
    plan = plan_chunks([ShardIndex(0, (entry,), {})])
    storage, attempt = open_storage(str(tmp_path)), Attempt(StoredStep(1, 0), "x")
    part = write_part(storage, attempt, plan, [0], lambda key, box: VALUES[box.slices], name=0)
    publish(storage, attempt, [part], plan.tensors, plan.chunk_parts(), {})
    return StoredCheckpoint.open(open_storage(str(tmp_path)))


class Recorded:
    """A storage that records how large the reads are that go past the cache and by way of it."""

    def __init__(self, storage: Any, *, refuses: bool = False) -> None:
        self.storage = storage
        self.refuses = refuses
        self.asked = 0
        self.past_cache: list[int] = []
        self.cached: list[int] = []
        self.prefetched: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read_past_cache(self, name: str, buffer: memoryview, offset: int) -> int | None:
        assert offset % BLOCK_NBYTES == buffer.nbytes % BLOCK_NBYTES == 0
        assert np.frombuffer(buffer, np.uint8).ctypes.data % BLOCK_NBYTES == 0
        self.asked += 1
        if self.refuses:
            return None
        self.past_cache.append(buffer.nbytes)
        # The same bytes, also where the file system of the tests refuses.
        return int(self.storage.read_into(name, [buffer], offset))

    def read_into(self, name: str, buffers: Any, offset: int = 0) -> int:
        self.cached.append(sum(buffer.nbytes for buffer in buffers))
        return int(self.storage.read_into(name, buffers, offset))

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        self.prefetched.append(nbytes)


@pytest.mark.parametrize("box", [Box.whole(SHAPE), Box((700, 3), (600, 900))])
@pytest.mark.parametrize(("past_cache", "refuses"), [(False, False), (True, False), (True, True)])
def test_boxes_are_the_same_past_the_page_cache(
    source: StoredCheckpoint, box: Box, past_cache: bool, refuses: bool
) -> None:
    recorded = Recorded(source.storage, refuses=refuses)
    into = np.zeros((*box.shape, 4), np.uint8)
    request = BoxRequest("w", box, into.reshape(-1).data)
    replace(source, storage=recorded).read([request], past_cache=past_cache)
    assert np.array_equal(into, VALUES[box.slices])
    goes_past = past_cache and not refuses
    assert any(nbytes >= 2**20 for nbytes in recorded.past_cache) == goes_past
    assert any(nbytes >= 2**20 for nbytes in recorded.cached) != goes_past


def test_a_file_system_that_refuses_is_not_asked_again(source: StoredCheckpoint) -> None:
    recorded = Recorded(source.storage, refuses=True)
    reading = replace(source, storage=recorded)
    into = np.zeros((*SHAPE, 4), np.uint8)
    request = BoxRequest("w", Box.whole(SHAPE), into.reshape(-1).data)
    reading.read([request], past_cache=True)
    asked = recorded.asked
    assert asked
    reading.read([request], past_cache=True)
    assert recorded.asked == asked


def test_what_goes_past_the_cache_is_not_prefetched_into_it(
    source: StoredCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_reads, "_PREFETCHED_RUNS", 1)
    for past_cache in (True, False):
        recorded = Recorded(source.storage)
        into = np.zeros((*SHAPE, 4), np.uint8)
        request = BoxRequest("w", Box.whole(SHAPE), into.reshape(-1).data)
        replace(source, storage=recorded).read([request], past_cache=past_cache)
        assert any(nbytes >= 2**20 for nbytes in recorded.prefetched) != past_cache


def _chunks(source: StoredCheckpoint) -> list[Path]:
    root = Path(source.storage.url) / source.directory
    return sorted(path for path in (root / "w").rglob("*") if path.stat().st_size > 2**20)


def test_changed_and_cut_files_are_found_past_the_page_cache(source: StoredCheckpoint) -> None:
    into = np.zeros((*SHAPE, 4), np.uint8)
    request = BoxRequest("w", Box.whole(SHAPE), into.reshape(-1).data)
    path = _chunks(source)[0]
    intact = path.read_bytes()
    for nbytes in (2**20, 1, 0):
        path.write_bytes(intact[:nbytes])
        with pytest.raises(CheckpointDamaged, match="ends before byte"):
            source.read([request], past_cache=True)
    path.write_bytes(intact[: 2**21 + 2**19])
    with pytest.raises(CheckpointDamaged, match="ends before byte"):
        source.read([request], past_cache=True)
    path.write_bytes(intact[:5000] + bytes([intact[5000] ^ 1]) + intact[5001:])
    with pytest.raises(CheckpointDamaged, match="does not match its checksum"):
        source.read([request], past_cache=True)
    path.write_bytes(intact)
    source.read([request], past_cache=True)
    assert np.array_equal(into, VALUES)
