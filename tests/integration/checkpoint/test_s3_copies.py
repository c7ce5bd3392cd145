"""Claims about what is not sent to S3 again: tensors that have not changed since the last save."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import boto3
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.errors import CheckpointDamaged
from keepstep.checkpoint.format.stored import s3_copies
from keepstep.checkpoint.format.stored.housekeeping import remove
from keepstep.checkpoint.format.stored.last_part import LastPart
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.saving.process_saver import PROCESS_SAVER
from keepstep.checkpoint.saving.saver import Saver
from tests.integration.checkpoint.recorded_s3 import Recorder, Request, serve

FROZEN_NBYTES = 4 * 600 * 1000


@pytest.fixture(scope="module")
def s3_endpoint(recorder: Recorder) -> Iterator[tuple[str, int]]:
    with serve(recorder, None) as address:
        yield address


@pytest.fixture(autouse=True)
def no_requests(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.reset()
    monkeypatch.setattr(PROCESS_SAVER, "last_part", LastPart())


@pytest.fixture
def url(s3: str) -> str:
    return f"{s3}/{uuid.uuid4().hex}/a%20b c+ü"


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {name: torch.randn(600, 1000) for name in ("frozen", "tuned")}


def save_both(url: str, state: dict[str, torch.Tensor], step: int) -> None:
    state["tuned"].add_(1)
    checkpoint.save(url, state, step=step)


def chunks_sent(recorder: Recorder) -> list[Request]:
    """Return the requests that sent, or copied, chunks."""
    return [r for r in recorder.requests if r.method == "PUT" and "/c." in r.path]


def check(url: str, state: dict[str, torch.Tensor], step: int) -> None:
    into = {name: torch.zeros(600, 1000) for name in state}
    assert checkpoint.load(url, into, step=step) == step
    assert all(torch.equal(into[name], state[name]) for name in state)
    StoredCheckpoint.open(open_storage(url), step).verify()


def test_frozen_weights_are_copied_within_s3_and_survive_the_removal_of_older_checkpoints(
    url: str, state: dict[str, torch.Tensor], recorder: Recorder
) -> None:
    save_both(url, state, 1)
    for step in (2, 3):
        recorder.requests.clear()
        save_both(url, state, step)
        sent, copied = (
            [r for r in chunks_sent(recorder) if bool(r.copied_from) is is_copy]
            for is_copy in (False, True)
        )
        assert [("/tuned/" in r.path, r.nbytes > FROZEN_NBYTES) for r in sent] == [(True, True)]
        assert [("/frozen/" in r.path, r.nbytes) for r in copied] == [(True, 0)]
    remove(open_storage(url), StoredStep(1, 0), now=0.0)
    remove(open_storage(url), StoredStep(2, 0), now=0.0)
    check(url, state, 3)


def test_a_background_save_copies_too(
    url: str, state: dict[str, torch.Tensor], recorder: Recorder
) -> None:
    saver = Saver()
    try:
        for step in (1, 2):
            recorder.requests.clear()
            state["tuned"].add_(1)
            saver.save(url, state, step=step).wait()
    finally:
        saver.close()
    assert sorted(bool(r.copied_from) for r in chunks_sent(recorder)) == [False, True]
    check(url, state, 2)


def change(url: str, edit: Callable[[bytearray], None]) -> None:
    """Change the frozen chunk of step 1, by another client than that under test."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/{StoredStep(1, 0).directory}")
    (key,) = (item["Key"] for item in listed["Contents"] if "/frozen/c." in item["Key"])
    data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    edit(data)
    client.put_object(Bucket=bucket, Key=key, Body=bytes(data))


def flip(data: bytearray) -> None:
    data[1000] ^= 1


@pytest.mark.parametrize("ignores_conditions", [False, True])
@pytest.mark.parametrize("edit", [flip, bytearray.clear, lambda data: data.append(0)])
def test_a_chunk_that_is_damaged_in_the_last_checkpoint_is_sent_again(
    url: str,
    state: dict[str, torch.Tensor],
    recorder: Recorder,
    edit: Callable[[bytearray], None],
    ignores_conditions: bool,
) -> None:
    save_both(url, state, 1)
    change(url, edit)
    recorder.ignores_conditions = ignores_conditions
    recorder.requests.clear()
    save_both(url, state, 2)
    asked, sent = [r for r in chunks_sent(recorder) if "/frozen/" in r.path]
    assert asked.copied_from
    assert ("PreconditionFailed" in asked.answer) is not ignores_conditions
    assert not sent.copied_from
    check(url, state, 2)
    with pytest.raises(CheckpointDamaged):
        StoredCheckpoint.open(open_storage(url), 1).verify()


def test_a_chunk_that_was_deleted_is_sent_again(
    url: str, state: dict[str, torch.Tensor], recorder: Recorder
) -> None:
    save_both(url, state, 1)
    open_storage(url).delete_directory(StoredStep(1, 0).directory)
    recorder.requests.clear()
    save_both(url, state, 2)
    assert [r.nbytes > FROZEN_NBYTES for r in chunks_sent(recorder) if not r.copied_from] == [
        True
    ] * 2
    check(url, state, 2)


def test_where_copies_are_refused_the_rest_is_sent_without_asking_again(
    url: str, recorder: Recorder
) -> None:
    state = {f"frozen{number}": torch.randn(600, 1000) for number in range(20)}
    checkpoint.save(url, state, step=1)
    recorder.refuses_copies = True
    recorder.requests.clear()
    checkpoint.save(url, state, step=2)
    # Four threads may have asked before the first answer came.
    assert 1 <= sum(bool(r.copied_from) for r in chunks_sent(recorder)) <= 4
    check(url, state, 2)


def test_a_copy_that_s3_does_not_tell_the_md5_of_is_sent(
    url: str, state: dict[str, torch.Tensor], recorder: Recorder
) -> None:
    save_both(url, state, 1)
    recorder.hides_copies = True
    recorder.requests.clear()
    save_both(url, state, 2)
    frozen = [bool(r.copied_from) for r in chunks_sent(recorder) if "/frozen/" in r.path]
    assert frozen == [True, False]
    check(url, state, 2)


def test_an_endpoint_that_botocore_refuses_fails_no_save(
    url: str, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of services of docker compose may have an underscore, as no host's may."""
    save_both(url, state, 1)
    opened = s3_copies.open_client
    at_service = "http://minio_server:9000"
    monkeypatch.setattr(
        s3_copies,
        "open_client",
        lambda location, *rest, **named: opened(
            replace(location, endpoint=at_service), *rest, **named
        ),
    )
    save_both(url, state, 2)
    check(url, state, 2)


def test_once_s3_does_not_answer_a_copy_no_further_one_is_asked_for(
    url: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_copies, "_ANSWER_TIMEOUT_S", 0.5)
    state = {f"frozen{number}": torch.randn(600, 1000) for number in range(20)}
    checkpoint.save(url, state, step=1)
    recorder.answered_copies = iter([None, None])
    recorder.requests.clear()
    checkpoint.save(url, state, step=2)
    # Four threads may have waited at that time.
    assert 1 <= recorder.unanswered_copies <= 4
    assert sum(not r.copied_from for r in chunks_sent(recorder)) == 18
    check(url, state, 2)
