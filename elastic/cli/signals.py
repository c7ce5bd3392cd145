"""Handles the signals that end `keepstep run`."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.elastic.agent.agent import Agent


def _print_tasks() -> None:
    """Print every task's chain of coroutines, down to the one that it waits in."""
    for task in asyncio.all_tasks():
        chain = []
        coroutine: Any = task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            chain.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            coroutine = getattr(coroutine, "cr_await", None)
        print(f"[keepstep] {task.get_name()}: {' > '.join(chain)}", file=sys.stderr)


class Signals:
    """Handles SIGTERM and SIGINT: the first lets the agent leave, the second cancels it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._agent: Agent | None = None
        self._task: asyncio.Future[Any] | None = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        # For debugging an agent that waits.
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _print_tasks)

    def connect(self, agent: Agent | None, task: asyncio.Future[Any]) -> None:
        """Have the next signals let an agent leave, or cancel a task without one."""
        self._agent, self._task = agent, task

    def close(self) -> None:
        """Leave the signals to Python again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _receive(self, number: int) -> None:
        if self.number is None and self._agent is not None:
            self._agent.ask_to_leave()
        elif self._task is not None:
            self._task.cancel()
        self.number = number
