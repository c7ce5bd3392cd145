"""Claims about calls that may never return."""

import threading

from ops.gpu.background import BackgroundCall, described
from ops.gpu.groups import wait_all
from tests.adaptive_timeouts import patient


def test_call_that_does_not_return_is_not_waited_for() -> None:
    release = threading.Event()
    call = BackgroundCall(release.wait, None).start()
    assert not call.wait(0.01)
    release.set()
    assert call.wait(patient(60))
    assert call.error is None


def test_exception_of_a_call_is_kept() -> None:
    def fail() -> None:
        raise ValueError("first line\nsecond line")

    call = BackgroundCall(fail, None).start()
    assert call.wait(patient(60))
    assert described(call.error) == "ValueError: first line"
    assert described(None) == ""


def test_calls_have_ended_only_when_each_has() -> None:
    release = threading.Event()
    calls = [BackgroundCall(function, None).start() for function in (dict, release.wait, dict)]
    assert calls[0].wait(patient(60))
    assert not wait_all(calls, 0.01)
    release.set()
    assert wait_all(calls, patient(60))
