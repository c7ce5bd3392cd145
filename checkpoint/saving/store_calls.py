"""Calls torch's store, with a limit on how long each call is waited for.

The client of a `TCPStore` waits for an answer without limit. If the host that serves the store
vanishes and nothing closes the connection, the answer never comes, and the call cannot be ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from keepstep.checkpoint.errors import RankFailed

_LOOK_S = 1.0
"""How long after a save was given up a call is waited for at most, in seconds."""

_Result = TypeVar("_Result")


class StoreCalls:
    """Makes calls in a thread of its own, one at a time. `start` starts it, `close` ends it.

    A call without an answer keeps its thread for as long as the process lives; all calls after it
    fail at once.

    Args:
        limit_s: how long a call is waited for.
        given_up: once set, no call is waited for any longer than a second.
    """

    def __init__(self, limit_s: float, given_up: threading.Event) -> None:
        self.given_up = given_up
        self.is_stuck = False
        """Whether a call got no answer."""
        self._limit_s = limit_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether calls can be made."""
        return self._thread is not None and not self.is_stuck

    def start(self) -> None:
        """Start the thread. An interpreter that exits cannot."""
        self._thread = threading.Thread(target=self._run, name="keepstep-store", daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], _Result]) -> _Result:
        """Return what a function returns, or raise what it raises.

        Raises:
            RankFailed: it has not returned in time, or one before it has not.
        """
        if not self.is_stuck:
            answer: Future[_Result] = Future()
            self._calls.put((act, answer))
            deadline_s = time.monotonic() + self._limit_s
            while not answer.done() and (remaining_s := deadline_s - time.monotonic()) > 0:
                was_given_up = self.given_up.is_set()
                wait([answer], min(remaining_s, _LOOK_S))
                if was_given_up:
                    break
            if answer.done():
                return answer.result()
            self.is_stuck = True
        raise RankFailed(
            f"the job's store has not answered for {self._limit_s:g} s: the host that serves it, "
            "or the network to it, is gone"
        )

    def close(self) -> None:
        """End the thread; one that has no answer yet ends when it gets it."""
        if self._thread is not None:
            self._calls.put(None)
            if not self.is_stuck:
                self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            act, answer = item
            try:
                answer.set_result(act())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                answer.set_exception(error)
            # They refer to the store, which the process group's end is to free.
            del item, act, answer
