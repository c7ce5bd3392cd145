"""Requests to object stores that are sent more than once: which answer counts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorstore

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.stored.objects import ObjectStorage


class Store:
    """Answers a read when the next one has come, each with what it is told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.promises = list(answers), list[Any]()

    def read(self, name: str) -> Any:
        promise, future = tensorstore.Promise.new()
        self.promises.append(promise)
        if len(self.promises) == len(self.answers):
            threading.Thread(target=self.tell).start()
        return future

    def tell(self) -> None:
        for promise, answer in zip(self.promises, self.answers, strict=True):
            promise.set_exception(answer) if isinstance(answer, Exception) else promise.set_result(
                answer
            )


class Found:
    state, value = "value", b"content"


def test_request_that_was_given_up_and_fails_then_does_not_end_the_one_sent_again() -> None:
    store = Store(ConnectionError("reset by peer"), Found())
    assert ObjectStorage("s3://bucket", store, request_timeout_s=0.05).read("a") == b"content"


def test_when_all_requests_have_failed_the_error_is_told() -> None:
    store = Store(ConnectionError("reset by peer"), ConnectionError("reset once more"))
    with pytest.raises(CheckpointError, match="reset"):
        ObjectStorage("s3://bucket", store, request_timeout_s=0.05).read("a")
