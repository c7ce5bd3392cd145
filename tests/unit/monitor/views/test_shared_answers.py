"""Tests that equal questions of several pages are answered once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from keepstep.monitor.views.shared_answers import SharedAnswers


class Computing:
    """Counts its calls; each answer waits until it is released."""

    def __init__(self) -> None:
        self.calls = 0
        self.released = asyncio.Event()

    def of(self, question: str) -> Callable[[], Awaitable[str]]:
        async def compute() -> str:
            self.calls += 1
            await self.released.wait()
            return f"{question} {self.calls}"

        return compute


def test_pages_that_ask_at_once_or_soon_after_share_an_answer() -> None:
    async def check() -> None:
        now_s = [0.0]
        answers, computing = SharedAnswers(lambda: now_s[0]), Computing()
        asked = [answers.get("heat", 1.0, computing.of("heat")) for _ in range(3)]
        waiting = asyncio.gather(*asked)
        await asyncio.sleep(0)
        computing.released.set()
        assert await waiting == ["heat 1"] * 3
        now_s[0] = 0.9
        assert await answers.get("heat", 1.0, computing.of("heat")) == "heat 1"
        now_s[0] = 1.0
        assert await answers.get("heat", 1.0, computing.of("heat")) == "heat 2"
        assert await answers.get("overview", 1.0, computing.of("overview")) == "overview 3"

    asyncio.run(check())


def test_answer_that_takes_longer_than_it_stays_fresh_is_computed_once() -> None:
    """Each second restarted it, and the thread that diagnoses had ever more of it to do."""

    async def check() -> None:
        now_s = [0.0]
        answers, computing = SharedAnswers(lambda: now_s[0]), Computing()
        first = asyncio.ensure_future(answers.get("heat", 1.0, computing.of("heat")))
        await asyncio.sleep(0)
        now_s[0] = 5.0
        later = asyncio.ensure_future(answers.get("heat", 1.0, computing.of("heat")))
        await asyncio.sleep(0)
        computing.released.set()
        assert await asyncio.gather(first, later) == ["heat 1"] * 2
        assert computing.calls == 1
        # It is fresh from when it was computed.
        now_s[0] = 5.9
        assert await answers.get("heat", 1.0, computing.of("heat")) == "heat 1"
        now_s[0] = 6.0
        assert await answers.get("heat", 1.0, computing.of("heat")) == "heat 2"

    asyncio.run(check())


def test_page_that_is_closed_does_not_take_the_answer_from_others() -> None:
    async def check() -> None:
        answers, computing = SharedAnswers(lambda: 0.0), Computing()
        closed = asyncio.ensure_future(answers.get("heat", 1.0, computing.of("heat")))
        other = asyncio.ensure_future(answers.get("heat", 1.0, computing.of("heat")))
        await asyncio.sleep(0)
        closed.cancel()
        await asyncio.sleep(0)
        computing.released.set()
        assert await other == "heat 1"

    asyncio.run(check())


def test_failure_is_raised_and_not_kept() -> None:
    async def fail() -> str:
        raise ValueError("no such rank")

    async def check() -> None:
        answers, computing = SharedAnswers(lambda: 0.0), Computing()
        computing.released.set()
        with pytest.raises(ValueError, match="no such rank"):
            await answers.get("heat", 1.0, fail)
        assert await answers.get("heat", 1.0, computing.of("heat")) == "heat 1"

    asyncio.run(check())


def test_answers_are_bounded_in_number() -> None:
    async def check() -> None:
        answers, computing = SharedAnswers(lambda: 0.0), Computing()
        computing.released.set()
        for number in range(1000):
            await answers.get(f"steps/{number}", 1.0, computing.of("step"))
        assert len(answers._answers) <= 64
        # The newest are kept.
        await answers.get("steps/999", 1.0, computing.of("step"))
        assert computing.calls == 1000

    asyncio.run(check())
