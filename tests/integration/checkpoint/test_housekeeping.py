"""Tests of removal, garbage collection and copies while other processes write."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointExists
from keepstep.checkpoint.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.stored import housekeeping
from keepstep.checkpoint.stored.chunking import plan_chunks
from keepstep.checkpoint.stored.format import REMOVED, StoredStep
from keepstep.checkpoint.stored.housekeeping import collect_garbage, copy, remove
from keepstep.checkpoint.stored.pruning import GRACE_S
from keepstep.checkpoint.stored.reader import StoredCheckpoint
from keepstep.checkpoint.stored.storage import Storage, open_storage
from keepstep.checkpoint.stored.writer import publish, write_part

NOW_S = 1.7e9
STEP = StoredStep(1, 0)
NOTE = f"{STEP.directory}/{REMOVED}"


class ResumedStorage:
    """A storage in which a writer uses a directory again right after it was listed."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def names(self) -> Sequence[str]:
        names = self.storage.names()
        self.storage.delete(NOTE)
        return names


class RecordingStorage:
    """A storage that records the expected and the actual number of bytes of each read."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.reads: dict[str, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def read(self, name: str, nbytes: int = 0) -> bytes:
        data = self.storage.read(name)
        self.reads[name] = (nbytes, len(data))
        return data


@pytest.fixture
def url() -> str:
    """A URL at which step 1 was stored, and removed an hour ago."""
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, {"x": torch.ones(4)}, step=1)
    remove(url, STEP, now=NOW_S - GRACE_S)
    return url


def test_a_removed_step_that_is_being_written_again_is_not_collected(url: str) -> None:
    storage = open_storage(url)
    entry = Entry(
        key="x",
        dtype="uint8",
        global_shape=(4,),
        box=Box.whole((4,)),
        byte_offset=0,
        nbytes=4,
    )
    plan = plan_chunks([ShardIndex(0, (entry,), {})])
    part = write_part(
        storage, STEP, plan, [0], lambda key, box: np.full((4, 1), 7, np.uint8), name=0
    )
    assert collect_garbage(url, now=NOW_S) == ()
    publish(storage, STEP, [part], plan.tensors, {})
    filled = {"x": torch.zeros(4, dtype=torch.uint8)}
    assert checkpoint.load(url, filled) == 1
    assert filled["x"].tolist() == [7] * 4


def test_a_removed_step_that_is_being_copied_to_is_not_collected(url: str) -> None:
    source = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(source, {"x": torch.ones(4)}, step=1)
    collected = []
    copy(
        StoredCheckpoint.open(source),
        url,
        lambda nbytes: collected.append(collect_garbage(url, now=NOW_S)),
    )
    assert collected == [()]
    StoredCheckpoint.open(url).verify()


def test_a_note_that_a_writer_deletes_meanwhile_counts_as_none(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "open_storage", lambda url: ResumedStorage(open_storage(url)))
    assert collect_garbage(url, now=NOW_S) == ()


def test_a_copy_never_changes_another_checkpoint_of_the_step() -> None:
    source, target = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(source, {"x": torch.ones(4)}, step=1)
    checkpoint.save(target, {"x": torch.zeros(4)}, step=1)
    with pytest.raises(CheckpointExists, match="never overwritten"):
        copy(StoredCheckpoint.open(source), target)
    filled = {"x": torch.ones(4)}
    checkpoint.load(target, filled)
    assert filled["x"].tolist() == [0] * 4


def test_a_copy_can_be_repeated() -> None:
    source, target = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(source, {"x": torch.ones(4)}, step=1)
    for _ in range(2):
        assert copy(StoredCheckpoint.open(source), target) == STEP
    StoredCheckpoint.open(target).verify()


@pytest.mark.parametrize("note", [b"", b'{"at_s": ', b"[]", b'{"at_s": null}'])
def test_a_damaged_note_is_written_again(url: str, note: bytes) -> None:
    open_storage(url).write(NOTE, [note])
    assert collect_garbage(url, now=NOW_S) == ()
    assert collect_garbage(url, now=NOW_S + GRACE_S) == (STEP.directory,)
    assert open_storage(url).names() == []


def test_a_copy_passes_the_size_of_each_object_so_that_slow_reads_get_enough_time() -> None:
    source, target = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(source, {"small": torch.ones(4), "large": torch.ones(700, 500)}, step=1)
    recording = RecordingStorage(open_storage(source))
    copy(replace(StoredCheckpoint.open(source), storage=recording), target)
    assert len(recording.reads) >= 5
    sizes = recording.reads.values()
    assert all(expected == actual for expected, actual in sizes), recording.reads
