"""Claims about checkpoints in a file system: bytes are in order, and a commit survives a crash."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.errors import CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.stored import files
from keepstep.checkpoint.format.stored.files import FileStorage
from keepstep.checkpoint.format.stored.transfer_memory import allocate

BLOCK = mmap.PAGESIZE


def test_a_commit_is_flushed_with_all_directories_above_it_after_it_was_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it may vanish when power is lost, though `save` has returned."""
    events: list[tuple[str, Path]] = []
    flush, link = files._flush, os.link

    def note_flush(path: Path) -> None:
        flush(path)
        events.append(("flush", path))

    def note_link(source: Path, path: Path) -> None:
        link(source, path)
        events.append(("link", path))

    monkeypatch.setattr(files, "_flush", note_flush)
    monkeypatch.setattr(files.os, "link", note_link)
    root = tmp_path / "run"
    FileStorage(str(root), root).create("step/manifest.json", b"{}")
    manifest = root / "step" / "manifest.json"
    after_link = {path for kind, path in events[events.index(("link", manifest)) :]}
    assert {manifest, manifest.parent, root, *root.parents} <= after_link


sizes = st.one_of(
    st.integers(0, 40),
    st.integers(0, 3).map(lambda blocks: blocks * BLOCK),
    st.integers(-3, 3).map(lambda more: 2**20 + more * 7),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(sizes, st.sampled_from([0, 1, 64])), min_size=1, max_size=5))
def test_pieces_of_any_size_and_alignment_are_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: list[tuple[int, int]]
) -> None:
    """Pieces that lie on a page go straight to the device, others by way of staged memory."""
    # Any flag that is not zero has the same code run where the file system lacks direct writes.
    monkeypatch.setattr(files, "_O_DIRECT", os.O_NOFOLLOW)
    rng = np.random.default_rng(len(pieces))
    views, expected = [], b""
    assume(any(nbytes for nbytes, _ in pieces))
    for nbytes, misplaced in pieces:
        memory = np.frombuffer(mmap.mmap(-1, nbytes + misplaced + 1), np.uint8)
        piece = memory[misplaced : misplaced + nbytes]
        piece[...] = rng.integers(0, 256, nbytes, np.uint8)
        views.append(piece.data)
        expected += piece.tobytes()
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    assert files._write_direct(path, views)
    assert path.read_bytes() == expected


@pytest.mark.parametrize("size", [0, 5, BLOCK, 2**20, 2**21 + 5])
@pytest.mark.parametrize("offset", [0, BLOCK, 2**20])
@pytest.mark.parametrize("most", [2**30, BLOCK, 512])
def test_whole_blocks_are_read_past_the_page_cache_up_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, offset: int, most: int
) -> None:
    """Also if the system reads less at a time, and parts of blocks."""
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    (tmp_path / "file").write_bytes(content)
    preadv = os.preadv

    def read_less(descriptor: int, buffers: list[memoryview], at: int) -> int:
        return preadv(descriptor, [buffers[0][:most]], at)

    # As above: the flag stands for a file system with direct reads.
    monkeypatch.setattr(files, "_O_DIRECT", os.O_NOFOLLOW)
    monkeypatch.setattr(files.os, "preadv", read_less)
    memory = allocate(2**20)[: 2**20].data
    count = FileStorage(str(tmp_path), tmp_path).read_past_cache("file", memory, offset)
    expected = content[offset : offset + 2**20]
    assert count == len(expected)
    assert bytes(memory[:count]) == expected


@pytest.mark.parametrize("refusing", ["open", "preadv"])
@pytest.mark.parametrize("reason", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_may_refuse_to_read_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str, reason: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(reason, os.strerror(reason))

    (tmp_path / "file").write_bytes(bytes(2**20))
    memory = allocate(2**20)[: 2**20].data
    monkeypatch.setattr(files.os, refusing, refuse)
    assert FileStorage(str(tmp_path), tmp_path).read_past_cache("file", memory, 0) is None


def test_a_missing_file_is_missing_past_the_page_cache_too(tmp_path: Path) -> None:
    memory = allocate(2**20)[: 2**20].data
    with pytest.raises(CheckpointMissing):
        FileStorage(str(tmp_path), tmp_path).read_past_cache("nothing", memory, 0)


def test_directory_that_this_user_may_not_open_is_not_flushed_and_a_file_is_no_such_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(files.os, "open", refuse)
    files._flush(tmp_path)
    with pytest.raises(PermissionError):
        files._flush(file)


def test_checkpoint_is_committed_below_a_directory_that_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Automounters refuse it; the save failed after it had been committed."""
    fsync, above = os.fsync, tmp_path.stat().st_ino

    def refuse(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == above:
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", refuse)
    storage = FileStorage(str(tmp_path / "run"), tmp_path / "run")
    storage.create("step/manifest.json", b"{}")
    assert storage.exists("step/manifest.json")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_file_or_disk_that_cannot_be_flushed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = tmp_path / "file"
    file.touch()

    def refuse(_: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OSError, match="refused"):
        files._flush(file if number == errno.EINVAL else tmp_path)


def test_directory_above_is_deleted_with_the_last_one_in_it(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path), tmp_path)
    for attempt in ("first", "second"):
        storage.write(f"step/{attempt}/object", [b"content"])
    storage.delete_directory("step/first")
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["second"]
    storage.delete_directory("step/second")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_storage_that_does_not_answer_is_not_taken_for_one_without_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """An older checkpoint was loaded without a word, from Python 3.14 on."""
    storage = FileStorage("checkpoints", tmp_path)
    for step in ("step-1", "step-2"):
        storage.create(f"{step}/manifest.json", b"{}")
    assert sorted(storage.directories_with("manifest.json")) == ["step-1", "step-2"]
    assert not storage.exists("step-3/manifest.json")
    right = Path.stat

    def fail(path: Path, **options: bool) -> os.stat_result:
        if path.parent.name == "step-2":
            raise OSError(code, os.strerror(code))
        return right(path, **options)

    monkeypatch.setattr(Path, "stat", fail)
    # As Python 3.14 has it.
    monkeypatch.setattr(Path, "is_file", lambda path: path.parent.name != "step-2")
    for ask in (
        lambda: storage.exists("step-2/manifest.json"),
        lambda: storage.directories_with("manifest.json"),
        storage.names,
    ):
        with pytest.raises(CheckpointError, match="checkpoints"):
            ask()
