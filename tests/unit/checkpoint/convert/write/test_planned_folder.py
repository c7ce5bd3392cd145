"""Folders of planned files: taken up, compared, and never mixed with another checkpoint's."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from keepstep.checkpoint.convert.read.arrays import MemoryArray
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.pieces import whole
from keepstep.checkpoint.convert.write import dcp_leaves, planned_folder
from keepstep.checkpoint.convert.write.dcp_target import dcp_files
from keepstep.checkpoint.convert.write.deepspeed_universal_target import (
    deepspeed_universal_files,
)
from keepstep.checkpoint.convert.write.file_target import new_file
from keepstep.checkpoint.convert.write.planned_folder import write_folder
from keepstep.checkpoint.convert.write.selection import Selection
from keepstep.checkpoint.convert.write.zero_layout import ZeroLayout
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointExists
from tests.opened_checkpoints import open_any
from tests.unit.checkpoint.convert.write.sources import bytes_of, checkpoint_of

ADAM = checkpoint_of(is_tied=True)


def write(source: ForeignCheckpoint, folder: Path) -> list[int]:
    """Write a folder of DCP, and return how many bytes of tensors were reported, call by call."""
    reported: list[int] = []
    write_folder(str(folder), dcp_files(source), memory_nbytes=2**20, report=reported.append)
    return reported


def write_universal(source: ForeignCheckpoint, folder: Path) -> list[int]:
    reported: list[int] = []
    files = deepspeed_universal_files(Selection(whole=source), ZeroLayout())
    write_folder(str(folder), files, memory_nbytes=2**20, report=reported.append)
    return reported


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_leaves, "CHUNK_NBYTES", 100)
    monkeypatch.setattr(dcp_leaves, "FILE_NBYTES", 10_000)


def interrupted(monkeypatch: pytest.MonkeyPatch, writing: Callable[[], object], at: str) -> None:
    """Write until a file that is called so has all its bytes and is to get its name."""
    link = os.link

    def failing(source: Path, target: Path) -> None:
        if at in str(target):
            raise OSError("the machine went away")
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing)
        with pytest.raises(CheckpointError, match="went away"):
            writing()


@pytest.mark.parametrize("written", [write, write_universal])
def test_an_interrupted_folder_is_taken_up_and_its_files_are_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: Callable[[ForeignCheckpoint, Path], list[int]],
) -> None:
    folder = tmp_path / "folder"
    last = ".metadata" if written is write else "optimizer_state.pt"
    interrupted(monkeypatch, lambda: written(ADAM, folder), last)
    done = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert done
    # What a process that was killed leaves is in nobody's way.
    (next(iter(done)).parent / "__9_9.distcp.4711.unfinished").write_bytes(b"x")
    written(ADAM, folder)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    source = open_any(str(folder)).source
    assert bytes_of(source, "model/odd.weight") == bytes_of(ADAM, "model/odd.weight")


def test_a_folder_of_another_checkpoint_gets_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, lambda: write(ADAM, tmp_path), ".metadata")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = dict(ADAM.foreign_tensors)
    other["model/bias"] = whole(MemoryArray("float32", np.ones(3, np.float32), "other"))
    with pytest.raises(CheckpointExists, match=r"__\d_0\.distcp exists"):
        write(replace(ADAM, foreign_tensors=other), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_complete_folder_and_one_with_other_files_are_refused(tmp_path: Path) -> None:
    write(ADAM, tmp_path / "full")
    with pytest.raises(CheckpointExists, match=r"\.metadata exists"):
        write(ADAM, tmp_path / "full")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__7_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointExists, match="__7_0"):
        write(ADAM, tmp_path / "other")
    write_universal(ADAM, tmp_path / "steps")
    # Engines load the step that `latest_universal` names: it is not replaced.
    with pytest.raises(CheckpointExists, match="latest_universal exists"):
        write_universal(replace(ADAM, step=4), tmp_path / "steps")


def test_a_disk_that_writes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def damaging(url: str, verify: Callable[[str], None], *, nbytes: int) -> Iterator[IO[bytes]]:
        def verify_damaged(written: str) -> None:
            with open(written, "r+b") as file:
                file.seek(1500)
                first = file.read(1)[0]
                file.seek(1500)
                file.write(bytes([first ^ 1]))
            verify(written)

        with new_file(url, verify_damaged, nbytes=nbytes) as file:
            yield file

    monkeypatch.setattr(planned_folder, "new_file", damaging)
    with pytest.raises(CheckpointDamaged, match="is not what was written"):
        write(ADAM, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_in_memory_as_far_as_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_leaves, "CHUNK_NBYTES", 2**30)
    monkeypatch.setattr(dcp_leaves, "FILE_NBYTES", 2**30)
    values = np.zeros((3, 2**20), np.float64)
    array = MemoryArray("float64", values, "here")
    source = replace(ADAM, foreign_tensors={"model/w": whole(array)}, documents={})
    write(source, tmp_path / "first")  # Loads what is loaded once.
    tracemalloc.start()
    try:
        reported = write(source, tmp_path / "second")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(reported) == values.nbytes
    assert peak < 2**22
