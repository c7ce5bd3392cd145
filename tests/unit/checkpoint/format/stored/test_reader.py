"""Tests of what a reader asks its storage for: no more than it needs."""

from __future__ import annotations

import uuid
from dataclasses import replace

import numpy as np
import pytest

from keepstep.checkpoint.format.layout.boxes import Box, Entry, ShardIndex
from keepstep.checkpoint.format.layout.source import BoxRequest
from keepstep.checkpoint.format.stored.chunking import plan_chunks
from keepstep.checkpoint.format.stored.housekeeping import remove
from keepstep.checkpoint.format.stored.object_names import NEWEST, Attempt, StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import newest
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.stored_json import encode
from keepstep.checkpoint.format.stored.writer import publish, write_part
from tests.unit.checkpoint.storage_fixtures import RecordingStorage


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


def save(url: str, step: int) -> None:
    """Store two tensors, each by a writer of its own."""
    entries = [
        Entry(
            key=key,
            dtype="uint8",
            global_shape=(8,),
            box=Box.whole((8,)),
            byte_offset=0,
            nbytes=8,
        )
        for key in "ab"
    ]
    plan = plan_chunks([ShardIndex(0, (entry,), {}) for entry in entries])
    storage, attempt = open_storage(url), Attempt(StoredStep(step, 0), "x")
    parts = [
        write_part(
            storage, attempt, plan, [rank], lambda key, box: np.full((8, 1), ord(key), np.uint8),
            name=rank,
        )
        for rank in range(2)
    ]  # fmt: skip
    publish(storage, attempt, parts, plan.tensors, plan.chunk_parts(), {})


def note(url: str, content: bytes) -> None:
    open_storage(url).write(NEWEST, [content])


def test_only_listings_of_writers_of_what_is_read_are_read(url: str) -> None:
    save(url, 1)
    recording = RecordingStorage(open_storage(url))
    source = replace(StoredCheckpoint.open(open_storage(url)), storage=recording)
    for key, listings in (("b", ["000001.json"]), ("b", []), ("a", ["000000.json"])):
        recording.reads.clear()
        into = bytearray(8)
        source.read([BoxRequest(key, Box.whole((8,)), memoryview(into))])
        assert into == key.encode() * 8
        assert [name for name in recording.reads if name != "chunks.json"] == listings


def test_the_newest_is_found_without_a_list_of_all(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        save(url, step)
    recording = RecordingStorage(open_storage(url))
    assert newest(recording) == StoredStep(5, 0)
    assert recording.listed == []


def test_a_checkpoint_of_known_step_and_generation_is_opened_without_a_list(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 1)
    recording = RecordingStorage(open_storage(url))
    assert StoredCheckpoint.open(recording, 1, 0).step == 1
    assert (recording.listed, NEWEST in recording.reads) == ([], False)


OLDER, LATER = ({"directory": StoredStep(step, 0).directory} for step in (2, 9))


@pytest.mark.parametrize(
    "content",
    [encode(OLDER), encode(LATER), b"", b"[]", b"{}", encode({"directory": 7}), b"[" * 9**5],
)
def test_a_wrong_note_of_the_newest_misleads_nobody(url: str, content: bytes) -> None:
    for step in (1, 2, 3):
        save(url, step)
    note(url, content)
    assert newest(open_storage(url)) == StoredStep(3, 0)


def test_the_newest_was_removed(url: str) -> None:
    for step in (1, 2, 3):
        save(url, step)
    note(url, encode(OLDER))
    remove(open_storage(url), StoredStep(3, 0), now=0.0)
    assert newest(open_storage(url)) == StoredStep(2, 0)
    note(url, encode(OLDER))
    remove(open_storage(url), StoredStep(2, 0), now=0.0)
    assert not open_storage(url).exists(NEWEST)
    assert newest(open_storage(url)) == StoredStep(1, 0)
