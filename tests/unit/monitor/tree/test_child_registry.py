"""Claims about the file of children's URLs, which people and scripts edit while it is read."""

import os
from pathlib import Path

import pytest

from keepstep.monitor.errors import MonitorError
from keepstep.monitor.tree.child_registry import ChildrenFile


def test_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "rack1"
    path.write_text("http://a:1\n\nhttp://b:1  # the old one\n# none\n")
    file = ChildrenFile(path)
    assert file.urls() == ("http://a:1", "http://b:1")
    path.write_text("http://c:1\n")
    assert file.urls() == ("http://c:1",)
    path.unlink()
    # It is being replaced: the previous list remains.
    assert file.urls() == ("http://c:1",)


def test_unreadable_file_is_logged_once_and_the_last_valid_list_remains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rack1"
    path.write_text("http://a:1\n")
    file = ChildrenFile(path)
    path.write_bytes(b"http://\xff:1\n")
    for _ in range(3):
        assert file.urls() == ("http://a:1",)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    path.unlink()
    path.mkdir()
    for _ in range(3):
        assert file.urls() == ("http://a:1",)
    assert len(caplog.records) == 2
    path.rmdir()
    path.write_text("http://b:1\n")
    assert file.urls() == ("http://b:1",)


def test_file_that_cannot_be_read_at_the_start_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(MonitorError, match=os.fspath(path)):
            ChildrenFile(path)
