"""The context of collectives outside of steps, such as an evaluation's; see `Guard`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from keepstep.elastic.errors import UsageError

if TYPE_CHECKING:
    from keepstep.elastic.trainer.job import Job


class Guard:
    """Collectives outside of a step; nothing is trained in it.

    In the loop over `Job.batches`: `with job.guard() as guard: ...`. If a peer fails inside, the
    guard catches the exception, and the job recovers, as in a step. Then `completed` stays False,
    and the loop goes to the next batch, which is that of the restored state. What ran before
    `job.step()` in the loop's body runs again, for that state; what ran after it runs again only if
    its step is computed again. Other exceptions pass.

    Before, between and after such loops: `guard = job.guard()`, then `while not guard.completed:
    with guard: ...`. There it is entered again after a failure. A process that is new leaves out
    the guards that a later step shows to be over: they are completed from the beginning. So what
    the script needs of them afterwards belongs into `State.extra`. A guard that is entered without
    that question runs again in all processes, which begin the script anew after each recovery.
    """

    def __init__(self, job: Job, *, is_over: bool) -> None:
        self._job = job
        self._is_over = is_over
        self._is_completed = is_over
        self._was_asked = False

    @property
    def completed(self) -> bool:
        """Whether it was run to its end; also True of one that is over when it is made."""
        if self._is_over and not self._was_asked:
            self._job._left_out_guards += 1
        self._was_asked = True
        return self._is_completed

    def __enter__(self) -> Self:
        if self._is_over and self._was_asked:
            raise UsageError(
                "a guard that is completed is entered: this process is new, and the others do not "
                "run it again; enter it by `while not guard.completed: with guard: ...`"
            )
        self._job._enter_guard(is_unconditional=not self._was_asked)
        self._is_completed = self._is_over = False
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._is_completed = error is None
        self._was_asked = False
        if error is not None:
            return self._job._recover_in_guard(error)
        self._job._complete_guard()
        return False
