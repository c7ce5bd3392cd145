"""Says from when on a rank asks to end a pass over the data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A wish to end a pass over the data.

    Attributes:
        step: number of steps that were completed when it was made.
        pass_number: the pass, counted from 1.
    """

    step: int
    pass_number: int

    def holds(self, step: int, pass_number: int) -> bool:
        """Whether it holds at a state: not in one from before it, which the job has returned to."""
        return step >= self.step and pass_number == self.pass_number
