"""URLs of checkpoints and files: all that opens one reads it alike, and leaves nothing out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import fsspec
import pytest

from keepstep.checkpoint.convert.read.files import open_files
from keepstep.checkpoint.convert.write.file_target import new_file
from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.urls import ParsedUrl, parse_url


def write(url: str) -> None:
    file: AbstractContextManager[object] = new_file(url, nbytes=0)
    with file:
        pass


OPENERS = pytest.mark.parametrize("opens", [open_storage, open_files, write])


@OPENERS
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://b/run#1", r"memory://b/run#1: # begins a fragment .*choose a name without #"),
        ("memory://b/run?1", r"memory://b/run\?1: \? begins a query .*choose a name without \?"),
        ("memory://b/run?", r"memory://b/run\?: \? begins a query"),
        ("s3://b/run#1", r"# begins a fragment"),
        ("file:///d/run#2", r"file:///d/run#2: .*write %23, or give the path without file://"),
        ("file:///d/run?2", r"write %3F, or give the path without file://"),
        ("file://data/x.pt", r"file://data/x\.pt names a host; write file:///data/x\.pt"),
        ("s3://[b/run", r"s3://\[b/run is no URL"),
    ],
)
def test_a_url_with_a_part_that_no_storage_has_is_refused(
    opens: Callable[[str], object], url: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opens(url)


@pytest.mark.parametrize("name", ["run#1", "run?1", "run%231", "a?b#c"])
def test_a_path_may_have_any_characters(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with new_file(f"{path}/x.pt", nbytes=7) as file:
        file.write(b"content")
    assert (path / "x.pt").read_bytes() == b"content"
    assert list(open_storage(str(path)).names()) == ["x.pt"]
    assert open_files(f"{path}/x.pt").read("x.pt") == b"content"
    assert open_files(str(path)).read("x.pt") == b"content"


def test_escapes_are_decoded_in_urls_of_files(tmp_path: Path) -> None:
    (tmp_path / "run#1").mkdir()
    with new_file(f"file://{tmp_path}/run%231/x.pt", nbytes=7) as file:
        file.write(b"content")
    assert (tmp_path / "run#1" / "x.pt").read_bytes() == b"content"
    assert open_files(f"file://localhost{tmp_path}/run%231/x.pt").read("x.pt") == b"content"
    assert list(open_storage(f"file://{tmp_path}/run%231").names()) == ["x.pt"]


def test_the_name_of_an_object_is_as_it_is_written() -> None:
    assert parse_url("s3://b/run%231/x") == ParsedUrl("s3", "b", "/run%231/x")
    url = "memory://urls/a%20c"
    with new_file(url, nbytes=7) as file:
        file.write(b"content")
    assert fsspec.filesystem("memory").cat("/urls/a%20c") == b"content"
    fsspec.filesystem("memory").rm("/urls/a%20c")
