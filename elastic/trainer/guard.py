"""The context of collectives outside of steps, such as an evaluation's; see `Guard`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self


class Guard:
    """Collectives outside of a step: `with job.guard() as guard: ...`; nothing is trained in it.

    If a peer fails inside, `Guard` catches the exception, and the job recovers, as in a step. Then
    `completed` stays False, and the loop goes to the next batch, which is that of the restored
    state. What ran before `job.step()` in the loop's body runs again, for that state; what ran
    after it runs again only if its step is computed again. Other exceptions pass.

    It may be entered again: `while not guard.completed: with guard: ...` after the loop.
    """

    def __init__(
        self, recover: Callable[[BaseException], bool], note_completed: Callable[[], None]
    ) -> None:
        self._recover = recover
        self._note_completed = note_completed
        self.completed = False

    def __enter__(self) -> Self:
        self.completed = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.completed = error is None
        if error is not None:
            return self._recover(error)
        self._note_completed()
        return False
