"""Writes scalars for TensorBoard that have each step once, whatever fails meanwhile."""

from __future__ import annotations

from pathlib import Path

import keepstep

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as missing:
    raise SystemExit("TensorBoard is not installed: pip install tensorboard") from missing


class StepBoard:
    """Writes each step's values, by rank 0, and the number of ranks.

    TensorBoard drops the values of steps that the job computes again: pass `on_generation` to
    `keepstep.Callbacks`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        self._writer: SummaryWriter | None = None

    def on_generation(self, entered: keepstep.GenerationEntered) -> None:
        """Begin a file that replaces all steps that the state does not have."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        # Rank 0 may be another process from now on.
        if entered.rank == 0:
            first = entered.step + 1
            self._writer = SummaryWriter(self._directory, purge_step=first)
            self._writer.add_scalar("keepstep/ranks", entered.world_size, first)

    def on_rejected_step(self, rejected: keepstep.RejectedStep) -> None:
        """Note why a step was rejected."""
        if self._writer is not None:
            self._writer.add_text("keepstep/rejected", str(rejected), rejected.step)

    def write(self, job: keepstep.Job, **values: float) -> None:
        """Write the values of the step that the job is about to complete, by their names."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, job.steps + 1)
