"""Writes a file of metrics that has each step once, whatever fails meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import keepstep


class StepFile:
    """A JSON line for each step, written by rank 0.

    Lines of steps that the job computes again are removed: pass `on_generation` to
    `keepstep.Callbacks`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_generation(self, entered: keepstep.GenerationEntered) -> None:
        """Remove the lines of steps that the restored state does not have."""
        if entered.rank != 0 or not self._path.exists():
            return
        # A process that was killed may have written part of its last line.
        lines = self._path.read_text().splitlines(keepends=True)
        complete = [line for line in lines if line.endswith("}\n")]
        kept = [line for line in complete if json.loads(line)["step"] <= entered.step]
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text("".join(kept))
        unfinished.replace(self._path)

    def write(self, job: keepstep.Job, **metrics: float) -> None:
        """Append the line of the step that the job is about to complete."""
        if job.world.rank == 0:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": job.steps + 1, **metrics}) + "\n")
