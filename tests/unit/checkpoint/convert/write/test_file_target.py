"""Tests of files that are written: they are there when they are complete, verified and durable."""

from __future__ import annotations

import os
import stat
import sys
from importlib import import_module
from pathlib import Path

import fsspec
import pytest

from keepstep.checkpoint.convert.write.file_target import _part_nbytes, new_file
from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError


def refuse(written: str) -> None:
    raise CheckpointDamaged(f"{written} is not what was written")


def test_a_file_that_is_not_verified_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged), new_file(f"{tmp_path}/a", refuse, nbytes=7) as file:
        file.write(b"content")
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_is_not_verified_is_deleted() -> None:
    url = "memory://bucket/a"
    with pytest.raises(CheckpointDamaged), new_file(url, refuse, nbytes=7) as file:
        file.write(b"content")
    assert not fsspec.filesystem("memory").exists("/bucket/a")
    with new_file(url, nbytes=7) as file:
        file.write(b"content")
    assert fsspec.filesystem("memory").cat("/bucket/a") == b"content"
    fsspec.filesystem("memory").rm("/bucket/a")


def test_the_name_of_a_file_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync
    flushed: list[tuple[bool, bool]] = []

    def noted(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append((is_directory, (tmp_path / "a").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with new_file(str(tmp_path / "a"), nbytes=7) as file:
        file.write(b"content")
    assert flushed == [(False, False), (True, True)]


@pytest.mark.parametrize("nbytes", [0, 1, 450 * 10**9, 10**12, 5 * 2**40 - 1])
def test_an_object_of_any_size_has_no_more_parts_than_s3_allows(nbytes: int) -> None:
    part_nbytes = _part_nbytes(nbytes)
    assert 50 * 2**20 <= part_nbytes < 5 * 2**30
    assert part_nbytes % 2**18 == 0
    assert nbytes / part_nbytes <= 9_000


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://b/x", r"gs://b/x cannot be written: .*install gcsfs .*; or write to a disk"),
        ("unheard-of://b/x", r"unheard-of://b/x cannot be written: .*; use a path, file://, s3://"),
    ],
)
def test_an_object_store_without_its_package_is_told_with_the_package(
    monkeypatch: pytest.MonkeyPatch, url: str, message: str
) -> None:
    # As if it were not installed, for the import.
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "gs", raising=False)
    with pytest.raises(CheckpointError, match=message), new_file(url, nbytes=7):
        pass


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"a cannot be written: .*No space left"),
        new_file(str(tmp_path / "a"), nbytes=7),
    ):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
