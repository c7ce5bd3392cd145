"""Tests of requests to object stores that are sent more than once: which answer counts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import tensorstore

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored import writer
from keepstep.checkpoint.format.stored.objects import ObjectStorage


class Store:
    """Answers no read until as many as there are answers have arrived, then all in order."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.promises = list(answers), list[Any]()

    def read(self, name: str) -> Any:
        promise, future = tensorstore.Promise.new()
        self.promises.append(promise)
        if len(self.promises) == len(self.answers):
            threading.Thread(target=self.answer_all).start()
        return future

    def answer_all(self) -> None:
        for promise, answer in zip(self.promises, self.answers, strict=True):
            if isinstance(answer, Exception):
                promise.set_exception(answer)
            else:
                promise.set_result(answer)


class StoredValue:
    state, value = "value", b"content"


def test_failure_of_a_timed_out_request_does_not_end_the_repeated_one() -> None:
    store = Store(ConnectionError("reset by peer"), StoredValue())
    assert ObjectStorage("s3://bucket", store, request_timeout_s=0.05).read("a") == b"content"


def test_error_is_raised_when_all_requests_have_failed() -> None:
    store = Store(ConnectionError("reset by peer"), ConnectionError("reset once more"))
    with pytest.raises(CheckpointError, match="reset"):
        ObjectStorage("s3://bucket", store, request_timeout_s=0.05).read("a")


def test_after_a_failure_no_further_item_starts() -> None:
    started = []

    def act(item: int) -> None:
        started.append(item)
        if item == 0:
            raise OSError("no space left on device")
        time.sleep(0.001)

    with pytest.raises(OSError, match="no space left"):
        writer._map_parallel(act, range(20_000))
    assert len(started) < 20_000
