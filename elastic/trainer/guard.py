"""The context of collectives outside of steps, such as an evaluation's; see `Guard`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.generation_state import GenerationState
from keepstep.elastic.trainer.passes import Passes
from keepstep.elastic.trainer.step_control import StepControl
from keepstep.elastic.worker.session import Session

log = logging.getLogger("keepstep")


class GuardControl:
    """The guards of a job on one worker.

    Args:
        session: with the agent.
        state: of the current generation.
        passes: the job's passes over the data.
        steps: the job's steps.
        recover: leaves the generation, which something has ended, and enters the next one.
        restart_script: ends the process, so that another one runs the script from its beginning.
    """

    def __init__(
        self,
        *,
        session: Session,
        state: GenerationState,
        passes: Passes,
        steps: StepControl,
        recover: Callable[[BaseException], None],
        restart_script: Callable[[str], NoReturn],
    ) -> None:
        self._session = session
        self._state = state
        self._passes = passes
        self._steps = steps
        self._recover = recover
        self._restart_script = restart_script
        self._has_warned = False
        self.left_out = 0
        """Number of guards that this process has not run, because they were over."""

    def enter(self, *, is_unconditional: bool) -> None:
        """Begin a guard.

        Args:
            is_unconditional: the script has not asked whether it is completed already.
        """
        world, place = self._state.world, self._passes.place
        self._session.progress(world.generation, self._steps.completed)
        if place.is_in_loop and self._steps.batch_generation not in (None, world.generation):
            # Ranks that are new go on with the next batch.
            self._restart_script(
                "a guard in the loop was entered with the batch of a step or guard that was not "
                "completed; to go on instead, the script asks `completed` of these"
            )
        if is_unconditional and not place.is_in_loop and not self._has_warned:
            self._has_warned = True
            if world.rank == 0:
                log.warning(
                    "a guard outside of the loop over job.batches is entered without the question "
                    "whether it is completed: after each recovery the scripts of all ranks "
                    "restart and run it again. To run it once, write `guard = job.guard()`, then "
                    "`while not guard.completed: with guard: ...`"
                )
        place.enter_guard(is_unconditional=is_unconditional)

    def complete(self) -> None:
        """Note the end of a guard."""
        self._passes.place.complete_guard()
        self._session.progress(self._state.world.generation, self._steps.completed)

    def recover(self, error: BaseException) -> bool:
        """Recover from a failure in a guard; False if the error is the loop's own."""
        if not (isinstance(error, Exception) and self._steps.is_from_generation_end(error)):
            return False
        self._recover(error)
        return True


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
    that question runs again in all processes, which restart the script after each recovery.
    """

    def __init__(self, control: GuardControl, *, is_over: bool) -> None:
        self._control = control
        self._is_over = is_over
        self._is_completed = is_over
        self._was_asked = False

    @property
    def completed(self) -> bool:
        """Whether it was run to its end; also True of one that is over when it is made."""
        if self._is_over and not self._was_asked:
            self._control.left_out += 1
        self._was_asked = True
        return self._is_completed

    def __enter__(self) -> Self:
        if self._is_over and self._was_asked:
            raise UsageError(
                "a guard that is completed is entered: this process is new, and the others do not "
                "run it again; enter it by `while not guard.completed: with guard: ...`"
            )
        self._control.enter(is_unconditional=not self._was_asked)
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
            return self._control.recover(error)
        self._control.complete()
        return False
