"""Keeps a tracker's record with each step once, even if nothing can be removed from it, as in W&B.

A step counts once its snapshot is committed: until then it may be computed again. So values wait in
the training state, and are sent when `on_snapshot` reports that their step is safe:

    tracker = Tracker(CsvRecord(Path("run.csv")))
    callbacks = keepstep.Callbacks(on_generation=tracker.on_generation,
                                   on_snapshot=tracker.on_snapshot)
    with keepstep.join(build, callbacks=callbacks) as job:  # State(..., extra={"tracker": tracker})
        for batch in job.batches(data, 64):
            with job.step() as step:
                ...
                tracker.write(job.steps + 1, loss=mean_loss)  # the same on all ranks
    tracker.finish()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import keepstep


class Record(Protocol):
    """The written part of a tracker; W&B has `run.step` and `run.log(values, step=step)`."""

    def last_step(self) -> int:
        """Return the last step that it has; 0: none."""
        ...

    def append(self, step: int, values: dict[str, float]) -> None:
        """Add a step's values."""
        ...


class CsvRecord:
    """A line for each step: its number, and its values by name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def last_step(self) -> int:
        """Return the last step that the file has, without a line that was written in part."""
        if not self._path.exists():
            return 0
        text = self._path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._path.write_text(whole)
        lines = whole.splitlines()
        return int(lines[-1].partition(",")[0]) if lines else 0

    def append(self, step: int, values: dict[str, float]) -> None:
        """Add a line."""
        with self._path.open("a") as file:
            file.write(",".join([str(step), *(f"{k}={v!r}" for k, v in values.items())]) + "\n")


class Tracker:
    """Sends each step's values to a record once, in order, by rank 0."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._waiting: dict[int, dict[str, float]] = {}
        self._sends = False

    def on_generation(self, entered: keepstep.GenerationEntered) -> None:
        """Record the rank that sends from now on."""
        self._sends = entered.rank == 0

    def on_snapshot(self, committed: keepstep.SnapshotCommitted) -> None:
        """Send the safe values, without those that an earlier process has sent."""
        safe = [step for step in self._waiting if step <= committed.step]
        last = self._record.last_step() if self._sends else 0
        for step in sorted(safe):
            values = self._waiting.pop(step)
            if self._sends and step > last:
                self._record.append(step, values)

    def write(self, step: int, **values: float) -> None:
        """Queue a step's values, to be sent once it is safe; inside `with job.step()`."""
        self._waiting[step] = values

    def finish(self) -> None:
        """Send the rest, after the job's end."""
        last = max(self._waiting, default=0)
        self.on_snapshot(keepstep.SnapshotCommitted(generation=0, step=last))

    def state_dict(self) -> dict[str, Any]:
        """Return the unsent values: a process that replaces this one sends them."""
        return {"waiting": [[step, values] for step, values in self._waiting.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the unsent values of a state."""
        self._waiting = {step: dict(values) for step, values in state["waiting"]}
