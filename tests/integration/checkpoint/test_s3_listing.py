"""Claims about how directories are found in S3: by few requests, whatever is stored there."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
import trustme

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.object_names import MANIFEST, NEWEST, StoredStep
from keepstep.checkpoint.format.stored.objects import ObjectStorage
from keepstep.checkpoint.format.stored.s3_listing import S3Location, directories_with
from keepstep.checkpoint.format.stored.steps import list_steps, newest
from keepstep.checkpoint.format.stored.storage import open_storage
from tests.adaptive_timeouts import patient
from tests.integration.checkpoint.recorded_s3 import Recorder, serve


@pytest.fixture(scope="module")
def s3_endpoint(recorder: Recorder) -> Iterator[tuple[str, int]]:
    with serve(recorder, None) as address:
        yield address


@pytest.fixture(autouse=True)
def no_requests(recorder: Recorder) -> None:
    recorder.reset()


def put(url: str, *names: str) -> None:
    """Write empty objects by another client than that under test."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for name in names:
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=b"")


def location(url: str) -> S3Location:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Location(
        bucket=bucket,
        prefix=f"{prefix}/",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        region="us-east-1",
        has_keys=True,
    )


def test_the_newest_checkpoint_is_found_without_the_objects_of_older_ones(
    s3: str, recorder: Recorder
) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    for step in range(1, 31):
        directory = StoredStep(step, 0).directory
        put(url, f"{directory}/{MANIFEST}", *(f"{directory}/attempt-a/{n}" for n in range(49)))
    open_storage(url).write(NEWEST, [b'{"directory": "step-00000030-000000"}'])
    recorder.requests.clear()

    assert newest(open_storage(url)) == StoredStep(30, 0)

    (listing,) = (request for request in recorder.requests if request.is_listing)
    assert listing.keys == []
    # Keys of the noted checkpoint come after its name, and are one directory.
    assert listing.directories == [StoredStep(30, 0).directory]
    # Beside it, the note and the manifest that it names are read.
    assert len(recorder.requests) == 3

    recorder.requests.clear()
    assert [stored.step for stored in list_steps(open_storage(url))] == [*range(30, 0, -1)]
    (listing,) = (request for request in recorder.requests if request.is_listing)
    assert listing.keys == [NEWEST]


def test_a_service_that_ignores_where_to_begin_returns_no_older_directories(
    s3: str, recorder: Recorder
) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    put(url, "a/leaf", "b/leaf", "c/leaf")
    recorder.ignores_start = True
    recorder.requests.clear()
    assert open_storage(url).directories_with("leaf", after="b") == ["c"]
    assert recorder.requests[0].directories == ["a", "b", "c"]


def test_later_checkpoints_than_the_noted_one_are_found(s3: str, recorder: Recorder) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    put(url, *(f"{StoredStep(step, 0).directory}/{MANIFEST}" for step in (1, 2, 3, 4)))
    put(url, f"{StoredStep(5, 0).directory}/attempt-a/x")
    open_storage(url).write(NEWEST, [b'{"directory": "step-00000002-000000"}'])
    recorder.requests.clear()
    assert newest(open_storage(url)) == StoredStep(4, 0)
    assert {request.path.split("/")[3] for request in recorder.requests if not request.answer} == {
        StoredStep(step, 0).directory for step in (3, 4, 5)
    }
    assert [stored.step for stored in list_steps(open_storage(url))] == [4, 3, 2, 1]


def test_more_directories_than_an_answer_holds_are_all_found(s3: str, recorder: Recorder) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    names = [f"d{number:03}" for number in range(45)]
    put(url, *(f"{name}/leaf" for name in names[::2]), *(f"{name}/other" for name in names[1::2]))
    recorder.requests.clear()
    assert directories_with(location(url), "leaf", "", 60.0, page_size=10) == names[::2]
    assert sum(request.is_listing for request in recorder.requests) == 5
    assert directories_with(location(url), "leaf", "d021", 60.0, page_size=10) == names[22::2]


def test_names_that_a_url_must_escape_are_found(s3: str) -> None:
    url = f"{s3}/{uuid.uuid4().hex}/a%20b c+ü"
    storage = open_storage(url)
    storage.write("ü +%20/leaf", [b"x"])
    storage.write("b/leaf/deeper", [b"x"])
    assert storage.directories_with("leaf") == ["ü +%20"]
    assert storage.directories_with("leaf", after="é") == ["ü +%20"]


def test_directories_at_the_root_of_a_bucket_are_found(s3: str) -> None:
    bucket = uuid.uuid4().hex
    boto3.client("s3").create_bucket(Bucket=bucket)
    storage = open_storage(f"s3://{bucket}")
    storage.write("a/leaf", [b"x"])
    storage.write("b/leaf", [b"x"])
    assert storage.directories_with("leaf") == ["a", "b"]
    assert storage.directories_with("leaf", after="a") == ["b"]


def test_a_listing_without_credentials_is_anonymous(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    boto3.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/a/leaf", ACL="public-read")
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert open_storage(url).directories_with("leaf") == ["a"]


def test_keys_of_the_environment_need_no_profile(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in TensorStore's requests; botocore looks for one that AWS_PROFILE names nevertheless."""
    url = f"{s3}/{uuid.uuid4().hex}"
    put(url, "a/leaf")
    monkeypatch.setenv("AWS_PROFILE", "absent")
    assert open_storage(url).directories_with("leaf") == ["a"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(CheckpointError, match=r"profile \(absent\) could not be found; check"):
        open_storage(url).directories_with("leaf")


def test_the_endpoint_and_keys_of_a_profile_serve_objects_and_listings(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    (tmp_path / "config").write_text(
        f"[profile mine]\nendpoint_url = {os.environ['AWS_ENDPOINT_URL']}\nregion = us-east-1\n"
    )
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id = test\naws_secret_access_key = test\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", os.fspath(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.fspath(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    for name in ("ENDPOINT_URL", "REGION", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    storage = open_storage(url)
    storage.write("a/leaf", [b"x"])
    assert storage.read("a/leaf") == b"x"
    assert storage.directories_with("leaf") == ["a"]


def test_a_listing_trusts_the_authorities_that_tensorstore_trusts(
    s3: str, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3}/{uuid.uuid4().hex}"
    put(url, "a/leaf")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(os.fspath(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    monkeypatch.setenv("TENSORSTORE_CA_BUNDLE", os.fspath(tmp_path / "ca.pem"))
    with serve(recorder, context) as (host, port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{host}:{port}")
        assert directories_with(location(url), "leaf", "", 60.0) == ["a"]


def test_a_missing_bucket_is_an_error(s3: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"s3://no-such-bucket/x: could not list: .*bucket.*; check bucket"
    ) as caught:
        open_storage("s3://no-such-bucket/x").directories_with("leaf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_an_endpoint_that_nothing_answers_at_is_an_error_after_a_finite_time(
    s3: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    storage = open_storage(f"{s3}/x")
    assert isinstance(storage, ObjectStorage)
    storage = replace(storage, s3=replace(location(f"{s3}/x"), endpoint=endpoint))
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"could not list: .*127\.0\.0\.1:9.*; check bucket"):
        storage.directories_with("leaf")
    assert time.monotonic() - began_s < patient(40)


def test_only_a_listing_in_s3_loads_botocore(s3: str, tmp_path: Path) -> None:
    code = f"""
import sys
from keepstep.checkpoint.format.stored import objects
from keepstep.checkpoint.format.stored.storage import open_storage
for url in ({os.fspath(tmp_path)!r}, "memory://x"):
    storage = open_storage(url)
    storage.write("a/leaf", [b"x"])
    assert storage.directories_with("leaf") == ["a"]
storage = open_storage({f"{s3}/{uuid.uuid4().hex}"!r})
storage.write("a/leaf", [b"x"])
assert not {{"botocore", "s3fs", "fsspec"}} & set(sys.modules)
assert storage.directories_with("leaf") == ["a"]
assert "botocore" in sys.modules and "s3fs" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
