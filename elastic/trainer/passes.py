"""The passes of a job over its data: the data of the current one, and who ends it early.

A script may call `Job.batches` several times; each call is a pass, and global batches are counted
through all of them. A pass is not an epoch: it has as many epochs, or as many steps, as the call
asks for. All decisions follow from the position, which is part of the state: a process that is new,
or has returned to an older state, makes the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.position import Position
from keepstep.elastic.trainer.script_place import ScriptPlace


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


class Passes:
    """The passes that the script has begun in this process.

    Attributes:
        place: where the script is among them.
    """

    def __init__(self) -> None:
        self.place = ScriptPlace()
        self._current: DataPass[Any] | None = None
        self._stop_request: StopRequest | None = None

    @property
    def current(self) -> DataPass[Any] | None:
        """The pass that was begun last; None before the first."""
        return self._current

    def begin(self, data: DataPass[Any]) -> None:
        """Begin a pass, made with the count and the end of those before."""
        self.place.begin_pass(data.end - data.begin)
        self._current = data

    def has_more(self, position: Position) -> bool:
        """Whether the current pass has batches from a position on."""
        return self._current is not None and position.batch < self._current.end

    def request_stop(self, position: Position) -> None:
        """Ask to end the current pass after the next step that begins, if it has one."""
        if self.has_more(position):
            self._stop_request = StopRequest(position.step, self.place.count)

    def is_stop_requested(self, position: Position) -> bool:
        """Whether this rank has asked to end the current pass, in this state or one before it."""
        request = self._stop_request
        return request is not None and request.holds(position.step, self.place.count)

    def stop(self, position: Position) -> Position:
        """End the current pass after the step just completed, as all ranks have agreed.

        Returns:
            The position at the pass's end.
        """
        assert self._current is not None, "only `request_stop` asks for it"
        # This rank may be the only one that is left of those that know it.
        if not self.is_stop_requested(position):
            self._stop_request = StopRequest(position.step - 1, self.place.count)
        return replace(position, batch=self._current.end)

    def resume(self, position: Position) -> None:
        """Go on from a position that was restored."""
        if self._current is not None:
            self._current.resume(position)

    def located(self, position: Position) -> Position:
        """Return a position together with what a job that resumes there must know of its data."""
        return self._current.located(position) if self._current else position
