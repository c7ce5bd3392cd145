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

A process that is killed takes along what its tracker has not written yet: W&B's process ends with
it. `Tracker(WandbRecord(project="run7"), keep=1000)` keeps the last steps in the training state,
and the process that replaces it sends those that the record does not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import keepstep


class Record(Protocol):
    """The written part of a tracker."""

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


class WandbRecord:
    """A run of W&B, which the process that is rank 0 begins or goes on with.

    Args:
        options: of `wandb.init`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None
        self._last = 0

    def last_step(self) -> int:
        """Return the last step that the run has; offline a process knows none of another one."""
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._options)
            self._last = self._run.step - 1
        return self._last

    def append(self, step: int, values: dict[str, float]) -> None:
        """Log a step's values."""
        self._run.log(values, step=step)
        self._last = step


class Tracker:
    """Sends each step's values to a record once, in order, by rank 0.

    Args:
        record: where to.
        keep: how many steps to keep that were sent, for a record that a killed process leaves
            without its last ones.
    """

    def __init__(self, record: Record, keep: int = 0) -> None:
        self._record = record
        self._keep = keep
        self._values: dict[int, dict[str, float]] = {}
        self._sends = False

    def on_generation(self, entered: keepstep.GenerationEntered) -> None:
        """Record the rank that sends from now on."""
        self._sends = entered.rank == 0

    def on_snapshot(self, committed: keepstep.SnapshotCommitted) -> None:
        """Send the safe values, without those that an earlier process has sent."""
        if self._sends:
            last = self._record.last_step()
            for step in sorted(self._values):
                if last < step <= committed.step:
                    self._record.append(step, self._values[step])
        first = committed.step - self._keep + 1
        self._values = {step: it for step, it in self._values.items() if step >= first}

    def write(self, step: int, **values: float) -> None:
        """Queue a step's values, to be sent once it is safe; inside `with job.step()`."""
        self._values[step] = values

    def finish(self) -> None:
        """Send the rest, after the job's end."""
        last = max(self._values, default=0)
        self.on_snapshot(keepstep.SnapshotCommitted(generation=0, step=last))

    def state_dict(self) -> dict[str, Any]:
        """Return the values: a process that replaces this one sends those that are missing."""
        return {"values": [[step, values] for step, values in self._values.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the values of a state."""
        self._values = {step: dict(values) for step, values in state["values"]}
