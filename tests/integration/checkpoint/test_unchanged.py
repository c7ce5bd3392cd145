"""Tests of tensors that have not changed since the last checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored import files
from keepstep.checkpoint.format.stored.object_names import MANIFEST, StoredStep
from keepstep.checkpoint.saving.saver import Saver


def test_frozen_weights_are_linked_and_survive_the_removal_of_older_checkpoints(
    tmp_path: Path,
) -> None:
    frozen, tuned = torch.randn(600, 1000), torch.randn(600, 1000)
    inodes = {}
    for step in (1, 2, 3):
        tuned.add_(1)
        checkpoint.save(str(tmp_path), {"frozen": frozen, "tuned": tuned}, step=step)
        for name in ("frozen", "tuned"):
            (chunk,) = (tmp_path / StoredStep(step, 0).directory).glob(f"*/{name}/c.*")
            inodes[name, step] = chunk.stat().st_ino
    assert len({inodes["frozen", step] for step in (1, 2, 3)}) == 1
    assert len({inodes["tuned", step] for step in (1, 2, 3)}) == 3
    shutil.rmtree(tmp_path / StoredStep(1, 0).directory)
    into = {"frozen": torch.zeros(600, 1000), "tuned": torch.zeros(600, 1000)}
    assert checkpoint.load(str(tmp_path), into) == 3
    assert torch.equal(into["frozen"], frozen)
    assert torch.equal(into["tuned"], tuned)


def test_a_chunk_that_is_damaged_in_the_last_checkpoint_is_written_again(tmp_path: Path) -> None:
    frozen = torch.randn(600, 1000)
    checkpoint.save(str(tmp_path), {"frozen": frozen}, step=1)
    (chunk,) = (tmp_path / StoredStep(1, 0).directory).glob("*/frozen/c.*")
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.write_bytes(data)
    checkpoint.save(str(tmp_path), {"frozen": frozen}, step=2)
    into = {"frozen": torch.zeros(600, 1000)}
    checkpoint.load(str(tmp_path), into, step=2)
    assert torch.equal(into["frozen"], frozen)


def looks_of_a_save(root: Path, old_steps: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many files a save looks for where so many older steps are stored."""
    frozen = torch.randn(600, 1000)
    for step in range(old_steps):
        (root / StoredStep(step, 0).directory).mkdir(parents=True)
        (root / StoredStep(step, 0).directory / MANIFEST).write_bytes(b"{}")
    checkpoint.save(str(root), {"frozen": frozen}, step=1000)
    looks: list[Path] = []
    mode = files._mode

    def look(path: Path) -> int:
        looks.append(path)
        return mode(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_mode", look)
        checkpoint.save(str(root), {"frozen": frozen}, step=1001)
    inodes = {chunk.stat().st_ino for chunk in root.glob("step-*/*/frozen/c.*")}
    assert len(inodes) == 1, "the newest checkpoint was not found"
    return len(looks)


def test_a_save_looks_at_the_newest_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writer does, so that a look at all would grow with the history and the ranks."""
    few, many = (
        looks_of_a_save(tmp_path / str(old_steps), old_steps, monkeypatch)
        for old_steps in (10, 200)
    )
    assert few == many > 0


def test_what_was_written_last_and_removed_is_linked_to_the_newest_that_is_left(
    tmp_path: Path,
) -> None:
    """As after a rollback, which removes the steps that it undoes."""
    frozen = torch.randn(600, 1000)
    for step in (1, 2):
        checkpoint.save(str(tmp_path), {"frozen": frozen}, step=step)
        (chunk,) = (tmp_path / StoredStep(step, 0).directory).glob("*/frozen/c.*")
        if step == 1:
            first = chunk.stat().st_ino
    shutil.rmtree(tmp_path / StoredStep(2, 0).directory)
    checkpoint.save(str(tmp_path), {"frozen": frozen}, step=3)
    (chunk,) = (tmp_path / StoredStep(3, 0).directory).glob("*/frozen/c.*")
    assert chunk.stat().st_ino == first


def test_what_another_process_has_written_since_is_linked(tmp_path: Path) -> None:
    """As where blocking and background saves take turns: each knows what it wrote itself."""
    weights = torch.randn(600, 1000)
    checkpoint.save(str(tmp_path), {"weights": weights}, step=1)
    weights.add_(1)
    saver = Saver()
    try:
        saver.save(str(tmp_path), {"weights": weights}, step=2).wait()
    finally:
        saver.close()
    checkpoint.save(str(tmp_path), {"weights": weights}, step=3)
    inodes = {
        chunk.stat().st_ino
        for step in (2, 3)
        for chunk in (tmp_path / StoredStep(step, 0).directory).glob("*/weights/c.*")
    }
    assert len(inodes) == 1


def test_a_file_that_cannot_be_linked_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = torch.randn(600, 1000)
    checkpoint.save(str(tmp_path), {"frozen": frozen}, step=1)
    compared: list[object] = []
    has_content = files._has_content

    def compare(*arguments: Any) -> bool:
        compared.append(arguments)
        return has_content(*arguments)

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_has_content", compare)
        patch.setattr(files.os, "link", refuse)
        # The manifest is made by a link, too.
        with pytest.raises(CheckpointError):
            checkpoint.save(str(tmp_path), {"frozen": frozen}, step=2)
    assert len(compared) == 1
