"""The passes of a job over its data: where the current one begins and ends, and who ends it early.

A script may call `Job.batches` several times; each call is a pass, and global batches are counted
through all of them. What is decided here follows from the position, which is part of the state: a
process that is new, or has returned to an older state, decides alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.position import Position
from keepstep.elastic.trainer.stop_request import StopRequest


class Passes:
    """The passes that the script has begun in this process."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._current: DataPass[Any] | None = None
        self._is_loop_left = False
        self._was_guarded = False
        self._stop_request: StopRequest | None = None

    @property
    def count(self) -> int:
        """Number of passes that were begun."""
        return len(self._lengths)

    @property
    def end(self) -> int:
        """The global batch after the last one of all passes that were begun."""
        return sum(self._lengths)

    @property
    def current(self) -> DataPass[Any] | None:
        """The pass that was begun last; None before the first."""
        return self._current

    def begin(self, data: DataPass[Any]) -> None:
        """Begin a pass, made with `count` and `end`."""
        self._lengths.append(data.end - data.begin)
        self._current = data
        self._is_loop_left = self._was_guarded = False

    def leave_loop(self) -> None:
        """Note that the loop over the current pass is over, also by `break` or an error."""
        self._is_loop_left = True

    def complete_guard(self) -> None:
        """Note that a guard was completed."""
        self._was_guarded = self._is_loop_left

    @property
    def was_guarded(self) -> bool:
        """Whether a guard was completed after the loop over the current pass."""
        return self._was_guarded

    def is_over(self, position: Position) -> bool:
        """Whether a position is at the end of the current pass."""
        return self._current is not None and position.batch >= self._current.end

    def has_more(self, position: Position) -> bool:
        """Whether the current pass has batches from a position on."""
        return self._current is not None and position.batch < self._current.end

    def was_left_early(self, position: Position) -> bool:
        """Whether the loop was left, as by `break`, before the end of its pass."""
        return self._is_loop_left and self.has_more(position)

    def request_stop(self, position: Position) -> None:
        """Ask to end the current pass after the next step that begins, if it has one."""
        if self.has_more(position):
            self._stop_request = StopRequest(position.step, self.count)

    def is_stop_requested(self, position: Position) -> bool:
        """Whether this rank has asked to end the current pass, in this state or one before it."""
        request = self._stop_request
        return request is not None and request.holds(position.step, self.count)

    def stop(self, position: Position) -> Position:
        """End the current pass after the step just completed, as all ranks have agreed.

        Returns:
            The position at the pass's end.
        """
        assert self._current is not None, "only `request_stop` asks for it"
        # This rank may be the only one that is left of those that know it.
        if not self.is_stop_requested(position):
            self._stop_request = StopRequest(position.step - 1, self.count)
        return replace(position, batch=self._current.end)

    def resume(self, position: Position) -> None:
        """Go on from a position that was restored."""
        if self._current is not None:
            self._current.resume(position)

    def located(self, position: Position) -> Position:
        """Return a position together with what a job that resumes there must know of its data."""
        return self._current.located(position) if self._current else position
