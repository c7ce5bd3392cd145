"""Says which collectives a process runs that restarts the script, and who must restart it. Pure.

A process that takes a lost one's place runs the script from its first line, with the state that the
job has returned to. The others stay where they are in it. From then on all must issue the same
collectives. Those of the script are in steps and in guards; a global batch `b` of the state says
which of them a new process issues:

- Steps: none of the batches before `b`. A pass that ends at `b` or before yields nothing.
- Guards outside of loops, that is before the first pass, between two and after the last one: those
  that stand where the passes begun so far end at `b` or later. Where they end before it, a step
  came after the guard, so that every rank had completed it: it is over, and left out.
- A guard that the script enters without asking whether it is completed cannot be left out: a new
  process runs it, wherever it stands.
- Guards in the loop over a pass: those that the loop's body comes to with the batches from `b` on.

Any other process goes on where it is if it issues the same ones from there on; otherwise it
restarts the script too (`reason_to_restart`). A guard of the loop that is entered with a batch from
before the recovery is detected on entry, as for steps.
"""

from __future__ import annotations


class ScriptPlace:
    """Where a process is in its script: among passes over the data and the guards around them."""

    def __init__(self) -> None:
        self._count = 0
        self._begin = self._end = 0
        self._is_in_loop = False
        # Where the last pass ends before or after which this process ran guards, or left them out.
        self._guarded_at = -1
        self._ran_unconditional_guard = False

    @property
    def count(self) -> int:
        """Number of passes that were begun."""
        return self._count

    @property
    def end(self) -> int:
        """The global batch after the last one of all passes that were begun."""
        return self._end

    @property
    def is_in_loop(self) -> bool:
        """Whether the script is in the loop over a pass, and not before, between or after them."""
        return self._is_in_loop

    def begin_pass(self, length: int) -> None:
        """Note that the loop over a pass of `length` global batches begins."""
        self._count += 1
        self._begin, self._end = self._end, self._end + length
        self._is_in_loop = True

    def leave_loop(self) -> None:
        """Note that the loop over the current pass is over, also by `break` or an error."""
        self._is_in_loop = False

    def come_to_guard(self, batch: int) -> bool:
        """Note that a guard stands here; return whether it is over in a state, and is left out.

        Args:
            batch: number of global batches consumed in the state.
        """
        is_over = not self._is_in_loop and batch > self._end
        if is_over:
            # In an older state it is not.
            self._guarded_at = self._end
        return is_over

    def enter_guard(self, *, is_unconditional: bool) -> None:
        """Note that a guard is entered.

        Args:
            is_unconditional: the script has not asked whether it is completed already.
        """
        if is_unconditional and not self._is_in_loop:
            self._ran_unconditional_guard = True

    def complete_guard(self) -> None:
        """Note that a guard was run to its end."""
        if not self._is_in_loop:
            self._guarded_at = self._end

    def reason_to_restart(self, batch: int) -> str:
        """Return why this process must restart the script after a recovery; "" if it goes on.

        Args:
            batch: number of global batches consumed in the state that the job has returned to.
        """
        if self._ran_unconditional_guard:
            return (
                "ranks that are new run guards outside of the loop again, unless they are asked "
                "before: `guard = job.guard()`, then `while not guard.completed: with guard: ...`"
            )
        if self._is_in_loop and batch < self._begin:
            return "the restored position is in an earlier pass over the data"
        if not self._is_in_loop and batch != self._end:
            # After a `break`, a process that is new computes the next step.
            return "the last steps must be computed again"
        if batch <= self._guarded_at:
            return "ranks that are new run the guards outside of the loop again"
        return ""
