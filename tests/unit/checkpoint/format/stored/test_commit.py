"""Tests of the write that commits a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.manifest import StoredObject
from keepstep.checkpoint.format.stored.object_names import (
    MANIFEST,
    REMOVED,
    Attempt,
    StoredStep,
    part_name,
)
from keepstep.checkpoint.format.stored.objects import ObjectStorage
from keepstep.checkpoint.format.stored.pruning import Note
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.format.stored.writer import commit

ATTEMPT = Attempt(StoredStep(4, 1), "0123456789abcdef")
NOTE = f"{ATTEMPT.directory}/{REMOVED}"


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://{uuid.uuid4().hex}")


def committed(storage: Storage, parts: Sequence[StoredObject] = ()) -> bool:
    commit(storage, ATTEMPT, parts, {"zarr.json": b"{}"}, ())
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


PARTS = [StoredObject(part_name(number), 2, 7) for number in (0, 1)]


def test_attempt_is_not_committed_where_a_part_was_written_elsewhere(storage: Storage) -> None:
    """A writer was given a disk of its own, or another step."""
    storage.write(f"{ATTEMPT.directory}/{PARTS[0].name}", [b"{}"])
    another = Attempt(StoredStep(5, 1), ATTEMPT.name)
    storage.write(f"{another.directory}/{PARTS[1].name}", [b"{}"])
    with pytest.raises(CheckpointError, match=r"1 of 2 writers .* parts/000001.json is not in"):
        committed(storage, PARTS)
    assert not list_steps(open_storage(storage.url))


def test_attempt_with_a_part_that_is_there_and_not_listed_yet_is_committed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in PARTS:
        storage.write(f"{ATTEMPT.directory}/{part.name}", [b"{}"])
    monkeypatch.setattr(ObjectStorage, "names", lambda self, prefix: ())
    assert committed(storage, PARTS)


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
    assert not list_steps(open_storage(storage.url))


def test_committed_attempt_stays_so_where_its_note_cannot_be_read_then(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older checkpoints may have been removed already because there is this one."""
    create, read = ObjectStorage.create, ObjectStorage.read

    def refuse_note(self: ObjectStorage, name: str, *arguments: Any) -> Any:
        if name == NOTE:
            raise CheckpointError("the storage is away")
        return read(self, name, *arguments)

    def create_and_refuse(self: ObjectStorage, name: str, content: bytes) -> None:
        create(self, name, content)
        monkeypatch.setattr(ObjectStorage, "read", refuse_note)

    monkeypatch.setattr(ObjectStorage, "create", create_and_refuse)
    with pytest.raises(CheckpointError, match="the storage is away"):
        committed(storage)
    assert storage.exists(f"{ATTEMPT.stored.directory}/{MANIFEST}")
