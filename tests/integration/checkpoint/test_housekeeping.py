"""Tests of removal, garbage collection and copies while other processes write."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import pytest
import torch
import zarr

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointExists
from keepstep.checkpoint.stored.format import MANIFEST, REMOVED, ROOT, StoredStep, encode
from keepstep.checkpoint.stored.housekeeping import collect_garbage, copy, remove
from keepstep.checkpoint.stored.pruning import GRACE_S
from keepstep.checkpoint.stored.reader import StoredCheckpoint, list_steps
from keepstep.checkpoint.stored.storage import Storage, open_storage

NOW_S = 1.7e9
STEP = StoredStep(1, 0)
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


def format_1_of(url: str) -> None:
    """Make of the only checkpoint at a URL what older releases wrote: no attempt, no parts."""
    storage = open_storage(url)
    source = StoredCheckpoint.open(url)
    root = json.loads(source.verified(ROOT))
    root["attributes"]["keepstep"] = {"format": 1, "step": 1, "generation": 0}
    contents = {
        name.removeprefix(f"{source.directory}/"): storage.read(name)
        for name in storage.names(f"{source.directory}/")
    } | {ROOT: encode(root)}
    storage.delete_directory(STEP.directory)
    for name, content in contents.items():
        storage.write(f"{STEP.directory}/{name}", [content])
    entries = [
        [item.name, len(contents[item.name]), crc32c.crc32c(contents[item.name])]
        for item in source.manifest.objects
    ]
    manifest = {"format": 1, "step": 1, "generation": 0, "objects": entries}
    storage.write(f"{STEP.directory}/{MANIFEST}", [encode(manifest)])


@pytest.fixture(params=[1, 2])
def url(request: pytest.FixtureRequest) -> str:
    """A URL at which step 1 was stored, in either format."""
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, STATE, step=1)
    if request.param == 1:
        format_1_of(url)
    return url


def test_both_formats_are_read_and_verified(url: str) -> None:
    StoredCheckpoint.open(url).verify()
    filled = {name: torch.zeros_like(value) for name, value in STATE.items()}
    assert checkpoint.load(url, filled) == 1
    assert all(torch.equal(filled[name], value) for name, value in STATE.items())


def test_zarr_reads_both_formats(tmp_path: Path) -> None:
    checkpoint.save(str(tmp_path), STATE, step=1)
    for _ in range(2):
        root = tmp_path / StoredCheckpoint.open(str(tmp_path)).directory
        group = zarr.open_group(str(root), mode="r")
        for name, value in STATE.items():
            assert torch.equal(torch.from_numpy(group[name][:]), value)
        format_1_of(str(tmp_path))
    assert root == tmp_path / STEP.directory


def test_gc_deletes_no_tensor_of_format_1_that_is_named_as_an_attempt() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(url, {"attempt-1": torch.ones(700, 600)}, step=1)
    format_1_of(url)
    assert collect_garbage(url, now=NOW_S, grace_s=0) == ()
    StoredCheckpoint.open(url).verify()


def test_a_removed_checkpoint_is_collected_after_the_grace_time(url: str) -> None:
    directory = StoredCheckpoint.open(url).directory
    remove(url, STEP, now=NOW_S)
    assert list_steps(url) == ()
    assert collect_garbage(url, now=NOW_S + GRACE_S - 1) == ()
    assert open_storage(url).names() != []
    assert collect_garbage(url, now=NOW_S + GRACE_S) == (directory,)
    assert open_storage(url).names() == [f"{directory}/{REMOVED}"]
    assert collect_garbage(url, now=NOW_S + 25 * GRACE_S) == ()
    assert open_storage(url).names() == []


def test_a_removed_step_can_be_written_again_and_only_the_old_one_is_collected(url: str) -> None:
    remove(url, STEP, now=NOW_S)
    checkpoint.save(url, {"x": torch.zeros(4)}, step=1)
    assert len(collect_garbage(url, now=NOW_S + GRACE_S)) == 1
    StoredCheckpoint.open(url).verify()
    directory = StoredCheckpoint.open(url).directory
    assert all(
        name.startswith(f"{directory}/") or name.endswith((MANIFEST, REMOVED))
        for name in open_storage(url).names()
    )


def test_a_removed_step_that_is_being_copied_to_is_not_collected(url: str) -> None:
    source = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(source, {"x": torch.ones(4)}, step=1)
    removed = StoredCheckpoint.open(url).directory
    remove(url, STEP, now=NOW_S)
    collected: list[tuple[str, ...]] = []
    copy(
        StoredCheckpoint.open(source),
        url,
        lambda nbytes: collected.append(collect_garbage(url, now=NOW_S + GRACE_S)),
    )
    assert collected == [(removed,)]
    StoredCheckpoint.open(url).verify()


@pytest.mark.parametrize("note", [b"", b'{"at_s": ', b"[]", b'{"at_s": null}', b'{"at_s": 1.0}'])
def test_a_damaged_note_is_written_again(url: str, note: bytes) -> None:
    directory = StoredCheckpoint.open(url).directory
    remove(url, STEP, now=NOW_S)
    open_storage(url).write(f"{directory}/{REMOVED}", [note])
    for hour in range(2):
        assert collect_garbage(url, now=NOW_S + hour * GRACE_S) == ()
    assert collect_garbage(url, now=NOW_S + 2 * GRACE_S) == (directory,)


def test_a_copy_never_changes_another_checkpoint_of_the_step() -> None:
    source, target = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(source, {"x": torch.ones(4)}, step=1)
    checkpoint.save(target, {"x": torch.zeros(4)}, step=1)
    with pytest.raises(CheckpointExists, match="never overwritten"):
        copy(StoredCheckpoint.open(source), target)
    filled = {"x": torch.ones(4)}
    checkpoint.load(target, filled)
    assert filled["x"].tolist() == [0] * 4


def test_a_copy_can_be_repeated_and_leaves_no_second_set_of_objects(url: str) -> None:
    target = f"memory://{uuid.uuid4().hex}"
    for _ in range(2):
        assert copy(StoredCheckpoint.open(url), target) == STEP
        StoredCheckpoint.open(target).verify()
    assert len({name.split("/")[1] for name in open_storage(target).names()}) == 2


def test_a_copy_passes_the_size_of_each_object_so_that_slow_reads_get_enough_time() -> None:
    source, target = (f"memory://{uuid.uuid4().hex}" for _ in range(2))
    checkpoint.save(source, {"small": torch.ones(4), "large": torch.ones(700, 500)}, step=1)
    recording = RecordingStorage(open_storage(source))
    copy(replace(StoredCheckpoint.open(source), storage=recording), target)
    assert len(recording.reads) == 4
    sizes = recording.reads.values()
    assert all(expected == actual for expected, actual in sizes), recording.reads
