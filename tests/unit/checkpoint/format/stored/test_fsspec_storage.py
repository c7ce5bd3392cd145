"""Claims about storages that fsspec opens, without a server. `test_storages` has their contract."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.stored.storage import open_storage


def test_a_checkpoint_is_loaded_from_a_storage_that_can_only_be_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.arange(6.0)}, step=3)
    filled = {"w": torch.zeros(6)}
    assert checkpoint.load(f"local://{tmp_path}", filled) == 3
    assert torch.equal(filled["w"], torch.arange(6.0))


def test_nothing_is_written_where_no_object_can_be_created_conditionally(tmp_path: Path) -> None:
    url = f"local://{tmp_path}"
    storage = open_storage(url)
    for write in (
        storage.probe_writable,
        lambda: storage.create("a", b"1"),
        lambda: storage.write("a", [b"1"]),
    ):
        with pytest.raises(CheckpointError, match="local:// is read only here"):
            write()
    with pytest.raises(CheckpointError, match=r"write to a path, s3://, gs:// or az://"):
        checkpoint.save(url, {"w": torch.zeros(1)}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    storage = open_storage(f"local://{tmp_path}")
    assert not storage.exists("a")
    with pytest.raises(CheckpointMissing, match="no object a"):
        storage.size("a")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host/run7", "http:// is not supported"),
        ("nonsense://host/run7", "nonsense:// is not supported; use a path, file://"),
        ("az:///run7", "names no container; write az://CONTAINER/PREFIX"),
    ],
)
def test_a_url_that_nothing_can_be_stored_at_is_refused(url: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_storage(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(CheckpointError, match=r"az://c/run7 cannot be opened: .*[Ii]nstall adlfs"):
        open_storage("az://c/run7")
