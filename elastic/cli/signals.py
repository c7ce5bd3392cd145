"""Handles the signals that end `keepstep run`."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from keepstep.log_format import log_line
from keepstep.notices import NOTICES

if TYPE_CHECKING:
    from keepstep.elastic.agent.agent import Agent

_INSISTS = (signal.SIGTERM, signal.SIGINT)
_SAME_NOTICE_S = 1.0
"""Launchers repeat signals that the terminal has sent as well: within this time it is the same
notice."""


def _print_tasks() -> None:
    """Print every task's chain of coroutines, down to the one that waits."""
    for task in asyncio.all_tasks():
        chain = []
        coroutine: Any = task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            chain.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            coroutine = getattr(coroutine, "cr_await", None)
        print(log_line(f"{task.get_name()}: {' > '.join(chain)}"), file=sys.stderr)


class Signals:
    """Handles notices of the end: the first lets the agent leave, or ends the process if it has
    none.

    SIGTERM or SIGINT again, not sooner than a second later, ends it at once. Another signal than
    the first never does: schedulers send several kinds, one after the other.

    Attributes:
        number: the first that came, SIGTERM for a cloud's notice; None: none has.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._last_s: dict[int, float] = {}
        self._agent: Agent | None = None
        self._task: asyncio.Future[Any] | None = asyncio.current_task()
        # Under nohup(1) a job outlives its terminal.
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._handled = [n for n in NOTICES if not (is_kept and n == signal.SIGHUP)]
        for number in self._handled:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        # For debugging an agent that waits.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _print_tasks)

    def connect(self, agent: Agent | None, task: asyncio.Future[Any]) -> None:
        """Let the next signals make an agent leave, or cancel a task that has none."""
        self._agent, self._task = agent, task

    def announce(self) -> None:
        """Act as on a first SIGTERM; one that comes later is the first of its kind.

        The machine's own shutdown sends it, and must not end the hand-over.
        """
        if self.number is None:
            self._begin(signal.SIGTERM)

    def close(self) -> None:
        """Leave the signals to Python again."""
        for number in self._handled:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _receive(self, number: int) -> None:
        now_s = time.monotonic()
        last_s = self._last_s.get(number)
        self._last_s[number] = now_s
        if self.number is None:
            self._begin(number)
            return
        is_again = last_s is not None and now_s > last_s + _SAME_NOTICE_S
        if is_again and number in _INSISTS and self._task is not None:
            self._task.cancel()

    def _begin(self, number: int) -> None:
        self.number = number
        if self._agent is not None:
            self._agent.ask_to_leave()
        elif self._task is not None:
            self._task.cancel()
