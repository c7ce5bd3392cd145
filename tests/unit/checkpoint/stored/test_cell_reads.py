"""Claims about large reads past the page cache: the same bytes, and damage is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.layout.source import BoxRequest
from keepstep.checkpoint.stored.chunking import plan_chunks
from keepstep.checkpoint.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.checkpoint.stored.transfer_memory import BLOCK_NBYTES
from keepstep.checkpoint.stored.writer import publish, write_part

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
    return StoredCheckpoint.open(str(tmp_path))


class Recorded:
    """A storage that records at which offset and of which size reads are."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.reads: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read_into(self, name: str, buffers: Any, offset: int = 0) -> int:
        self.reads.append((offset, sum(buffer.nbytes for buffer in buffers)))
        return int(self.storage.read_into(name, buffers, offset))


@pytest.mark.parametrize("past_cache", [False, True])
@pytest.mark.parametrize("box", [Box.whole(SHAPE), Box((700, 3), (600, 900))])
def test_boxes_are_the_same_past_the_page_cache(
    source: StoredCheckpoint, box: Box, past_cache: bool
) -> None:
    recorded = Recorded(source.storage)
    into = np.zeros((*box.shape, 4), np.uint8)
    request = BoxRequest("w", box, into.reshape(-1).data)
    replace(source, storage=recorded).read([request], past_cache=past_cache)
    assert np.array_equal(into, VALUES[box.slices])
    large = [read for read in recorded.reads if read[1] >= 2**20]
    assert large
    in_blocks = [read for read in large if read[0] % BLOCK_NBYTES == read[1] % BLOCK_NBYTES == 0]
    assert len(in_blocks) == (len(large) if past_cache else 0)


def _chunks(source: StoredCheckpoint) -> list[Path]:
    root = Path(source.storage.url) / source.directory
    return sorted(path for path in (root / "w").rglob("*") if path.stat().st_size > 2**20)


def test_changed_and_cut_files_are_found_past_the_page_cache(source: StoredCheckpoint) -> None:
    into = np.zeros((*SHAPE, 4), np.uint8)
    request = BoxRequest("w", Box.whole(SHAPE), into.reshape(-1).data)
    path = _chunks(source)[0]
    intact = path.read_bytes()
    path.write_bytes(intact[: 2**20])
    with pytest.raises(CheckpointDamaged, match=f"ends at byte {2**20}"):
        source.read([request], past_cache=True)
    path.write_bytes(intact[:5000] + bytes([intact[5000] ^ 1]) + intact[5001:])
    with pytest.raises(CheckpointDamaged, match="does not match its checksum"):
        source.read([request], past_cache=True)
    path.write_bytes(intact)
    source.read([request], past_cache=True)
    assert np.array_equal(into, VALUES)
