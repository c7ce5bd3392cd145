"""Shares answers between pages: equal questions asked within a moment are answered once.

Every open page asks for the same data once a second, and answering takes time of the thread that
diagnoses. So an answer serves all who ask while it is fresh, and those who ask while it is computed
wait for it, however long that takes: no question is ever computed twice at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_MOST_ANSWERS = 64
"""Number of answers that are kept, the newest: questions have parameters, and anyone may invent
some."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer, and when it was computed."""

    text: str
    computed_at_s: float


class SharedAnswers:
    """Answers to questions, by the question. For one event loop.

    Args:
        now_s: monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._answers: dict[str, asyncio.Task[_Answer]] = {}
        self._now_s = now_s

    async def get(
        self, question: str, fresh_s: float, compute: Callable[[], Awaitable[str]]
    ) -> str:
        """Return the answer to a question: a fresh one, or that of `compute`.

        A failure is raised to all who wait for it, and not kept.

        Args:
            question: identifies it.
            fresh_s: seconds for which an answer, once computed, serves others too.
            compute: returns the answer.
        """
        task = self._answers.get(question)
        if task is None or (task.done() and not self._is_fresh(task, fresh_s)):
            task = asyncio.ensure_future(self._run(compute))
            # At the end of the dictionary, which is in the order of asking.
            self._answers.pop(question, None)
            self._answers[question] = task
            while len(self._answers) > _MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]
        # One who asked may go away; the others still want the answer.
        return (await asyncio.shield(task)).text

    async def _run(self, compute: Callable[[], Awaitable[str]]) -> _Answer:
        text = await compute()
        return _Answer(text, self._now_s())

    def _is_fresh(self, task: asyncio.Task[_Answer], fresh_s: float) -> bool:
        has_failed = task.cancelled() or task.exception() is not None
        return not has_failed and self._now_s() - task.result().computed_at_s < fresh_s
