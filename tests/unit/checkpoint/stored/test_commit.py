"""Tests of the write that commits a checkpoint."""

from __future__ import annotations

import uuid

import pytest

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.stored.object_names import MANIFEST, REMOVED, Attempt, StoredStep
from keepstep.checkpoint.stored.objects import ObjectStorage
from keepstep.checkpoint.stored.pruning import Note
from keepstep.checkpoint.stored.steps import list_steps
from keepstep.checkpoint.stored.storage import Storage, open_storage
from keepstep.checkpoint.stored.writer import commit

ATTEMPT = Attempt(StoredStep(4, 1), "0123456789abcdef")
NOTE = f"{ATTEMPT.directory}/{REMOVED}"


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://{uuid.uuid4().hex}")


def committed(storage: Storage) -> bool:
    commit(storage, ATTEMPT, (), {"zarr.json": b"{}"}, ())
    return storage.exists(f"{ATTEMPT.stored.directory}/{MANIFEST}")


@pytest.mark.parametrize(
    "note", [None, b"cut sh", Note(1.0, 2, is_closed=False).encode()], ids=["none", "cut", "open"]
)
def test_attempt_that_is_not_closed_is_committed(storage: Storage, note: bytes | None) -> None:
    if note is not None:
        storage.write(NOTE, [note])
    assert committed(storage)


def test_closed_attempt_is_not_committed(storage: Storage) -> None:
    storage.write(NOTE, [Note(1.0, 2, is_closed=True).encode()])
    with pytest.raises(CheckpointError, match="garbage collection gave it up"):
        committed(storage)
    assert not storage.exists(f"{ATTEMPT.stored.directory}/{MANIFEST}")


def test_attempt_that_is_closed_while_it_is_committed_is_not_left_committed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ObjectStorage.create

    def closed_meanwhile(self: ObjectStorage, name: str, content: bytes) -> None:
        storage.write(NOTE, [Note(1.0, 2, is_closed=True).encode()])
        create(self, name, content)

    monkeypatch.setattr(ObjectStorage, "create", closed_meanwhile)
    with pytest.raises(CheckpointError, match="garbage collection gave it up"):
        committed(storage)
    assert not storage.exists(f"{ATTEMPT.stored.directory}/{MANIFEST}")
    assert not list_steps(storage.url)
