"""The suite of tests that every storage passes: S3, Google Cloud Storage and Azure over HTTP."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointError, CheckpointExists, CheckpointMissing
from keepstep.checkpoint.format.stored import files
from keepstep.checkpoint.format.stored.fsspec_storage import FsspecStorage
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.format.stored.storage import Storage, open_storage

KINDS = ("file", "memory", "s3", "gcs", "azure")


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_url(request.param, request, tmp_path)


@pytest.fixture(params=[*KINDS, "s3 by fsspec"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3 by fsspec":
        url = new_url("s3", request, tmp_path)
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        return FsspecStorage(url, system, root, creates=True)
    return open_storage(new_url(request.param, request, tmp_path))


def new_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a place in which there is nothing."""
    name = uuid.uuid4().hex
    match kind:
        case "file":
            return f"file://{tmp_path}/new/place%20{name}"
        case "memory":
            return f"memory://{name}"
        case _:
            return f"{request.getfixturevalue(kind)}/{name}"


def test_an_object_is_read_as_it_was_written(storage: Storage) -> None:
    storage.write("a/b", [b"one", memoryview(b"two")])
    storage.flush(["a/b"])
    assert storage.read("a/b") == storage.read("a/b", nbytes=1) == b"onetwo"
    assert storage.exists("a/b")
    storage.write("a/b", [b"again"])
    first, second = bytearray(2), bytearray(3)
    assert storage.read_into("a/b", [memoryview(first), memoryview(second)]) == 5
    assert first + second == b"again"


@pytest.mark.parametrize("nbytes", [0, 1, 2, 16, 17, 63, 64, 65, 1000, 4097, 2**20 + 3])
def test_the_size_of_an_object_is_known(storage: Storage, nbytes: int) -> None:
    storage.write("a/b", [bytes(nbytes)])
    assert storage.size("a/b") == nbytes
    with pytest.raises(CheckpointMissing):
        storage.size("a/c")


def test_an_object_is_linked_only_if_its_bytes_are_the_same(storage: Storage) -> None:
    one, two = os.urandom(2**20), os.urandom(3)
    storage.write("a/b", [one, two])
    is_linked = storage.link("a/b", "c/b", [memoryview(one)[:7], one[7:], two])
    assert not storage.link("a/b", "d/b", [one, two[:2], b"?"])
    assert not storage.link("a/b", "d/b", [one, two[:2]])
    assert not storage.link("a/b", "d/b", [one, two, b"?"])
    assert not storage.link("a/none", "d/b", [one, two])
    assert is_linked == storage.can_link == isinstance(storage, files.FileStorage)
    if is_linked:
        storage.flush(["c/b"])
        storage.delete_directory("a")
        assert storage.read("c/b") == one + two


@pytest.mark.parametrize(
    ("offset", "nbytes", "counts"), [(0, 5, {5}), (1, 3, {3}), (2, 4, {3, 0}), (7, 1, {0})]
)
def test_a_partial_read_returns_the_number_of_bytes_read(
    storage: Storage, offset: int, nbytes: int, counts: set[int]
) -> None:
    storage.write("a", [b"12345"])
    first, second = bytearray(1), bytearray(nbytes - 1)
    count = storage.read_into("a", [memoryview(first), memoryview(second)], offset)
    assert count in counts
    if count == nbytes:
        assert first + second == b"12345"[offset : offset + nbytes]


@pytest.mark.parametrize("beyond", [-1, 0, 1, 4095, 4096, 2**20, 2**21 + 4097])
def test_large_objects_of_any_size_are_complete(storage: Storage, beyond: int) -> None:
    data = os.urandom(2**20 + beyond)
    pieces = [data[:5], memoryview(data)[5 : 2**19 + 3], data[2**19 + 3 :]]
    storage.write("a/large", pieces)
    assert storage.read("a/large") == data
    storage.write("a/large", [data[::-1]])
    assert storage.read("a/large") == data[::-1]


@pytest.mark.parametrize("refused_call", ["open", "posix_fallocate", "write"])
def test_a_file_system_without_direct_writes_gets_buffered_and_flushed_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_call: str
) -> None:
    flushed: list[int] = []
    original = {name: getattr(os, name) for name in ("open", "posix_fallocate", "write", "fsync")}

    def refuse(first: object, second: int | memoryview, *arguments: int) -> int:
        if refused_call == "posix_fallocate":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if refused_call == "write" or (isinstance(second, int) and second & os.O_DIRECT):
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(original[refused_call](first, second, *arguments))

    def fsync(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_size)
        original["fsync"](descriptor)

    monkeypatch.setattr(files.os, refused_call, refuse)
    monkeypatch.setattr(files.os, "fsync", fsync)
    storage = open_storage(str(tmp_path))
    data = bytes(2**20) + b"end"
    storage.write("a/large", [data])
    assert flushed == [len(data)]
    assert storage.read("a/large") == data
    assert storage.names() == ["a/large"]


def test_everything_is_flushed_before_a_checkpoint_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[Path] = set()
    original_flush, original_link = files._flush, os.link

    def flush(path: Path) -> None:
        flushed.add(path)
        original_flush(path)

    def link(unfinished: Path, path: Path) -> None:
        written = {file for file in tmp_path.rglob("*") if file != unfinished}
        assert len(written) > 8
        assert written | {tmp_path} <= flushed
        original_link(unfinished, path)

    monkeypatch.setattr(files, "_flush", flush)
    monkeypatch.setattr(files.os, "link", link)
    checkpoint.save(
        str(tmp_path), {"large": torch.zeros(700, 600), "small": torch.zeros(3)}, step=1
    )


def test_an_object_that_does_not_exist_is_missing(storage: Storage) -> None:
    assert not storage.exists("nothing")
    assert storage.names() == []
    assert storage.directories_with("manifest.json") == []
    storage.delete("nothing")
    storage.delete_directory("nothing")
    with pytest.raises(CheckpointMissing, match=r"no such object|no object"):
        storage.read("nothing")
    with pytest.raises(CheckpointMissing):
        storage.read_into("nothing", [memoryview(bytearray(1))])


def test_create_never_replaces(storage: Storage) -> None:
    storage.create("a/commit", b"first")
    with pytest.raises(CheckpointExists, match="never overwritten"):
        storage.create("a/commit", b"second")
    storage.create("a/commit", b"first")  # A repeated call whose reply was lost.
    assert storage.read("a/commit") == b"first"


def test_one_of_many_concurrent_creators_succeeds(storage: Storage) -> None:
    if storage.url.startswith("gs://"):
        pytest.skip("fake-gcs-server ignores ifGenerationMatch of simple uploads")
    succeeded = []

    def create(number: int) -> None:
        try:
            storage.create("commit", b"%d" % number)
        except CheckpointExists:
            return
        succeeded.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % number for number in succeeded] == [storage.read("commit")]


def test_names_are_listed_and_deleted_by_directory(storage: Storage) -> None:
    for name in ("a/x", "a/y/z", "ab/x", "b/manifest.json"):
        storage.write(name, [b"."])
    assert storage.names() == ["a/x", "a/y/z", "ab/x", "b/manifest.json"]
    assert storage.names("a/") == ["a/x", "a/y/z"]
    assert storage.directories_with("manifest.json") == ["b"]
    storage.write("ba/manifest.json", [b"."])
    assert sorted(storage.directories_with("manifest.json", after="a")) == ["b", "ba"]
    assert storage.directories_with("manifest.json", after="b") == ["ba"]
    assert storage.directories_with("manifest.json", after="ba") == []
    storage.delete("ba/manifest.json")
    storage.delete_directory("a")
    storage.delete("b/manifest.json")
    assert storage.names() == ["ab/x"]


def test_a_probe_leaves_no_objects(storage: Storage) -> None:
    storage.probe_writable()
    assert storage.names() == []


def test_a_checkpoint_saves_and_loads(url: str) -> None:
    state = {"x": torch.arange(12.0).reshape(3, 4), "epoch": 3}
    checkpoint.save(url, state, step=5)
    filled = {"x": torch.zeros(3, 4), "epoch": 0}
    assert checkpoint.load(url, filled) == 5
    assert torch.equal(filled["x"], state["x"])
    assert filled["epoch"] == 3
    assert [stored.step for stored in list_steps(open_storage(url))] == [5]


@pytest.mark.parametrize("scheme", ["abfs", "abfss"])
def test_azure_is_one_place_by_each_of_its_schemes(azure: str, scheme: str) -> None:
    name = uuid.uuid4().hex
    checkpoint.save(f"{azure}/{name}", {"x": torch.arange(3.0)}, step=5)
    filled = {"x": torch.zeros(3)}
    other = f"{azure.replace('az', scheme, 1)}/{name}"
    assert checkpoint.load(other, filled) == 5
    assert torch.equal(filled["x"], torch.arange(3.0))
    with pytest.raises(CheckpointExists):
        checkpoint.save(other, {"x": torch.zeros(3)}, step=5)


def test_a_missing_bucket_is_reported_by_the_probe(s3: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"s3://no-such-bucket/x: could not write .*check bucket"
    ) as caught:
        open_storage("s3://no-such-bucket/x").probe_writable()
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_a_directory_is_reported_by_the_probe(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="check that the place exists and is a directory"):
        open_storage(f"{tmp_path}/file/run").probe_writable()


@pytest.mark.parametrize("url", ["ftp://host/x", "s3:///x", "file://host/x"])
def test_urls_without_a_known_location_are_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match=url):
        open_storage(url)


def test_credentials_from_the_environment_need_no_files_and_print_nothing(
    s3: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    storage = open_storage(f"{s3}/{uuid.uuid4().hex}")
    storage.write("a", [b"x"])
    assert storage.read("a") == b"x"
    printed = [line for line in capfd.readouterr().err.splitlines() if "HTTP/1.1" not in line]
    assert printed == []
