"""Tests of removal, garbage collection and copies while other processes write."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.convert.write.file_target import new_file
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointExists
from keepstep.checkpoint.format.stored.housekeeping import collect_garbage, copy, remove
from keepstep.checkpoint.format.stored.object_names import MANIFEST, NEWEST, REMOVED, StoredStep
from keepstep.checkpoint.format.stored.pruning import GRACE_S, Note
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from tests.unit.checkpoint.format.stored.golden_checkpoint import put_golden

NOW_S = 1.7e9
STEP = StoredStep(30, 2)
STATE = {"large": torch.randn(700, 600), "small": torch.arange(4.0)}


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


class ClosedStorage:
    """A storage that checks after each change that a note is there, and closes its attempt."""

    def __init__(self, storage: Storage, note: str) -> None:
        self.storage = storage
        self.note = note
        self.changes = 0

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.storage, name)
        if name not in ("write", "delete", "delete_directory"):
            return act

        def change(*arguments: Any) -> None:
            act(*arguments)
            self.changes += 1
            note = Note.decode(self.storage.read(self.note))
            assert note is not None
            assert note.is_closed

        return change


@pytest.fixture
def url() -> str:
    """A URL at which one checkpoint was stored."""
    url = f"memory://{uuid.uuid4().hex}"
    put_golden(url)
    return url


def test_a_removed_checkpoint_is_collected_after_the_grace_time(url: str) -> None:
    directory = StoredCheckpoint.open(open_storage(url)).directory
    remove(open_storage(url), STEP, now=NOW_S)
    assert list_steps(open_storage(url)) == ()
    assert collect_garbage(open_storage(url), now=NOW_S + GRACE_S - 1) == ()
    assert open_storage(url).names() != []
    assert collect_garbage(open_storage(url), now=NOW_S + GRACE_S) == (directory,)
    assert open_storage(url).names() == [f"{directory}/{REMOVED}"]
    assert collect_garbage(open_storage(url), now=NOW_S + 25 * GRACE_S) == ()
    assert open_storage(url).names() == []


def test_the_note_that_closes_an_attempt_is_there_at_every_moment_of_its_deletion(url: str) -> None:
    """Where it is cut off, a writer that awakes must find that it is too late to commit."""
    note = f"{StoredCheckpoint.open(open_storage(url)).directory}/{REMOVED}"
    remove(open_storage(url), STEP, now=NOW_S)
    checked = ClosedStorage(open_storage(url), note)
    assert collect_garbage(checked, now=NOW_S + GRACE_S) != ()
    assert checked.changes >= 2
    assert open_storage(url).names() == [note]


def test_a_removed_step_can_be_written_again_and_only_the_old_one_is_collected(url: str) -> None:
    remove(open_storage(url), STEP, now=NOW_S)
    checkpoint.save(url, {"x": torch.zeros(4)}, step=30, generation=2)
    assert len(collect_garbage(open_storage(url), now=NOW_S + GRACE_S)) == 1
    StoredCheckpoint.open(open_storage(url)).verify()
    directory = StoredCheckpoint.open(open_storage(url)).directory
    assert all(
        name.startswith(f"{directory}/") or name.endswith((MANIFEST, REMOVED, NEWEST))
        for name in open_storage(url).names()
    )


def test_a_removed_step_that_is_being_copied_to_is_not_collected(url: str) -> None:
    source = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(source, {"x": torch.ones(4)}, step=30, generation=2)
    removed = StoredCheckpoint.open(open_storage(url)).directory
    remove(open_storage(url), STEP, now=NOW_S)
    collected: list[tuple[str, ...]] = []
    copy(
        StoredCheckpoint.open(open_storage(source)),
        open_storage(url),
        lambda nbytes: collected.append(collect_garbage(open_storage(url), now=NOW_S + GRACE_S)),
    )
    assert collected == [(removed,)]
    StoredCheckpoint.open(open_storage(url)).verify()


@pytest.mark.parametrize("note", [b"", b'{"at_s": ', b"[]", b'{"at_s": null}', b'{"at_s": 1.0}'])
def test_a_damaged_note_is_written_again(url: str, note: bytes) -> None:
    directory = StoredCheckpoint.open(open_storage(url)).directory
    remove(open_storage(url), STEP, now=NOW_S)
    open_storage(url).write(f"{directory}/{REMOVED}", [note])
    for hour in range(2):
        assert collect_garbage(open_storage(url), now=NOW_S + hour * GRACE_S) == ()
    assert collect_garbage(open_storage(url), now=NOW_S + 2 * GRACE_S) == (directory,)


def test_a_copy_never_changes_another_checkpoint_of_the_step() -> None:
    source, target = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(source, {"x": torch.ones(4)}, step=1)
    checkpoint.save(target, {"x": torch.zeros(4)}, step=1)
    with pytest.raises(CheckpointExists, match="never overwritten"):
        copy(StoredCheckpoint.open(open_storage(source)), open_storage(target))
    filled = {"x": torch.ones(4)}
    checkpoint.load(target, filled)
    assert filled["x"].tolist() == [0] * 4


def test_a_copy_can_be_repeated_and_leaves_no_second_set_of_objects(url: str) -> None:
    target = f"memory://{uuid.uuid4().hex}"
    for _ in range(2):
        assert copy(StoredCheckpoint.open(open_storage(url)), open_storage(target)) == STEP
        StoredCheckpoint.open(open_storage(target)).verify()
    names = open_storage(target).names(STEP.directory)
    assert len({name.split("/")[1] for name in names}) == 2


def test_a_copy_that_is_damaged_is_no_copy_when_it_is_repeated(tmp_path: Path, url: str) -> None:
    """It was said to be copied, and not a byte of it had been read."""
    copy(StoredCheckpoint.open(open_storage(url)), open_storage(str(tmp_path)))
    packs = [path for path in tmp_path.rglob("*") if path.parent.name == "packs"]
    content = bytearray(packs[0].read_bytes())
    content[len(content) // 2] ^= 1
    packs[0].write_bytes(content)
    with pytest.raises(CheckpointDamaged):
        copy(StoredCheckpoint.open(open_storage(url)), open_storage(str(tmp_path)))


def test_a_copy_passes_the_size_of_each_object_so_that_slow_reads_get_enough_time() -> None:
    source, target = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(source, {"small": torch.ones(4), "large": torch.ones(700, 500)}, step=1)
    recording = RecordingStorage(open_storage(source))
    copy(
        replace(StoredCheckpoint.open(open_storage(source)), storage=recording),
        open_storage(target),
    )
    assert len(recording.reads) == 6
    sizes = recording.reads.values()
    assert all(expected == actual for expected, actual in sizes), recording.reads


def test_what_a_writer_left_of_the_note_of_the_newest_is_collected(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), STATE, step=1)
    left = tmp_path / f"{NEWEST}.0123456789ab.unfinished"
    left.touch()
    for hour in range(2):
        assert collect_garbage(open_storage(str(tmp_path)), now=NOW_S + hour * GRACE_S) == ()
    assert collect_garbage(open_storage(str(tmp_path)), now=NOW_S + 2 * GRACE_S) == (left.name,)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {NEWEST, REMOVED}
    assert collect_garbage(open_storage(str(tmp_path)), now=NOW_S + 26 * GRACE_S) == ()
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {NEWEST}
    StoredCheckpoint.open(open_storage(str(tmp_path))).verify()


def test_what_was_left_next_to_the_checkpoints_is_deleted_at_once_without_grace(
    tmp_path: Path,
) -> None:
    left = tmp_path / f"{NEWEST}.0123456789ab.unfinished"
    left.touch()
    assert collect_garbage(open_storage(str(tmp_path)), now=NOW_S, grace_s=0) == (left.name,)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda storage: storage.write(NEWEST, [b"half"]),
        lambda storage: storage.write(REMOVED, [b"half"]),
        lambda storage: storage.probe_writable(),
    ],
    ids=["newest", "note", "probe"],
)
def test_what_a_killed_writer_left_next_to_the_checkpoints_has_a_name_that_is_collected(
    tmp_path: Path, write: Callable[[Storage], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # A process that is killed removes nothing.
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            write(open_storage(str(tmp_path)))
    (left,) = tmp_path.iterdir()
    assert collect_garbage(open_storage(str(tmp_path)), now=NOW_S, grace_s=0) == (left.name,)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("grace_s", [GRACE_S, 0])
def test_a_conversion_that_is_being_written_next_to_the_checkpoints_is_not_collected(
    tmp_path: Path, grace_s: float
) -> None:
    checkpoint.save(str(tmp_path), STATE, step=1)
    target = tmp_path / "x.pt"
    with new_file(str(target), nbytes=13) as file:
        file.write(b"half")
        file.flush()
        (unfinished,) = tmp_path.glob("x.pt.*.unfinished")
        for hour in range(3):
            assert (
                collect_garbage(
                    open_storage(str(tmp_path)), now=NOW_S + hour * 2 * GRACE_S, grace_s=grace_s
                )
                == ()
            )
            assert unfinished.exists()
        file.write(b" and half")
    assert target.read_bytes() == b"half and half"


def test_removal_does_not_list_the_other_checkpoints(url: str) -> None:
    """A full listing is everything under the URL on object stores, for each removed checkpoint."""
    opened, listed = open_storage(url), []

    class Listed(RecordingStorage):
        def __getattr__(self, name: str) -> Any:
            if name in ("names", "directories_with", "unfinished"):
                return lambda *arguments, **options: (
                    listed.append((name, *arguments))
                    or getattr(opened, name)(*arguments, **options)
                )
            return super().__getattr__(name)

    remove(Listed(opened), STEP, now=NOW_S)
    assert [found for found in listed if found[1:] != (f"{STEP.directory}/",)] == []
    assert list_steps(open_storage(url)) == ()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        remove(opened, STEP, now=NOW_S)
