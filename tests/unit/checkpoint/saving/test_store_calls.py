"""Claims about calls of a store that may never answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from keepstep.checkpoint.errors import RankFailed
from keepstep.checkpoint.saving.store_calls import StoreCalls


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Yield an event that is set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def started(limit_s: float) -> StoreCalls:
    calls = StoreCalls(limit_s, threading.Event())
    calls.start()
    return calls


def refuse() -> None:
    raise RuntimeError("the connection was reset")


def test_a_call_returns_or_raises_what_the_function_does() -> None:
    calls = started(60.0)
    assert calls.call(lambda: 3) == 3
    with pytest.raises(RuntimeError, match="was reset"):
        calls.call(refuse)
    assert calls.call(lambda: 4) == 4
    calls.close()


def test_a_call_without_an_answer_fails_in_time_and_all_after_it_at_once(
    never: threading.Event,
) -> None:
    calls = started(0.1)
    with pytest.raises(RankFailed, match=r"has not answered for 0\.1 s"):
        calls.call(never.wait)
    assert not calls.is_running
    called = threading.Event()
    with pytest.raises(RankFailed, match="has not answered"):
        calls.call(called.set)
    assert not called.is_set()
    calls.close()


def test_what_was_given_up_is_not_waited_for_as_long(never: threading.Event) -> None:
    calls = started(600.0)
    calls.given_up.set()
    with pytest.raises(RankFailed, match="has not answered"):
        calls.call(never.wait)
    calls.close()
