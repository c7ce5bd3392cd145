"""The handle of a save that goes on in the background."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from keepstep.checkpoint.errors import CheckpointError


class SaveHandle:
    """A save that goes on while training does. Made by `save(..., block=False)`.

    Attributes:
        url: where the checkpoint is stored.
        step: its step.
        generation: its generation.
        versions: the version counter (`Tensor._version`) that each copied tensor had, by its name
            in the checkpoint. A tensor with another counter has been written to since.
        previous_error: why the save before this one failed, the same on all ranks; None if it
            did not.
    """

    def __init__(
        self,
        url: str,
        step: int,
        generation: int,
        versions: Mapping[str, int],
        previous_error: CheckpointError | None,
        outcome: Future[CheckpointError | None],
    ) -> None:
        self.url = url
        self.step = step
        self.generation = generation
        self.versions = versions
        self.previous_error = previous_error
        self._outcome = outcome

    def done(self) -> bool:
        """Return whether the save is over, committed or failed."""
        return self._outcome.done()

    @property
    def error(self) -> CheckpointError | None:
        """Why the save failed; None if it has not, or is not over."""
        return self._outcome.result() if self._outcome.done() else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is committed.

        Args:
            timeout_s: how long to wait at most; None waits for as long as it takes.

        Raises:
            TimeoutError: it is not over yet.
            CheckpointError: it failed.
        """
        try:
            error = self._outcome.result(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError(
                f"{self.url}: step {self.step} is not stored after {timeout_s} s; it goes on"
            ) from None
        if error is not None:
            raise error

    def __repr__(self) -> str:
        state = "in progress"
        if self.done():
            state = "committed" if self.error is None else f"failed: {self.error}"
        return f"<SaveHandle of step {self.step} at {self.url}, {state}>"
