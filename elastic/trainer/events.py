"""Defines typed events by which a job informs the training loop, for logs and metrics.

The loop's functions are called on every rank, in the thread that trains, between steps: a snapshot
or a checkpoint that was completed during a step is reported at its end. An exception in them ends
the worker as any error of the script does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepstep.elastic.trainer.bad_steps import RejectedStep


@dataclass(frozen=True, slots=True)
class GenerationEntered:
    """The job has a set of members, and its state; the next step begins.

    Attributes:
        generation: its number; the first is 1.
        rank: this process's rank in it.
        world_size: the number of ranks.
        step: number of completed steps in the state. What was logged of later ones counts no more.
        source: where the state came from, such as "memory"; "start" if it was initialized.
    """

    generation: int
    rank: int
    world_size: int
    step: int
    source: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The job goes on in another generation than the first: something failed, or members changed.

    Attributes:
        entered: the generation.
        undone_steps: the steps that this process has computed and will compute again; None if the
            process is new.
        seconds: from the moment at which this process noticed the end of the generation before;
            None if the process is new.
    """

    entered: GenerationEntered
    undone_steps: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SnapshotCommitted:
    """A snapshot in memory can replace what any loss up to the parity takes away.

    Attributes:
        generation: the generation that it was taken in.
        step: number of steps in it; of several committed in one step, the newest is reported.
    """

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """A checkpoint is complete in storage.

    Attributes:
        step: number of steps in it; of several stored in one step, the newest is reported.
        url: where it lies.
    """

    step: int
    url: str


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions of the training loop's that are called for events; see `keepstep.join`."""

    on_generation: Callable[[GenerationEntered], None] | None = None
    on_recovery: Callable[[Recovered], None] | None = None
    on_snapshot: Callable[[SnapshotCommitted], None] | None = None
    on_checkpoint: Callable[[CheckpointStored], None] | None = None
    on_rejected_step: Callable[[RejectedStep], None] | None = None


class EventReporter:
    """Calls the callbacks, in each process once for what has happened.

    A process that replaces another one first reports what is stored already.

    Args:
        callbacks: the functions.
        url: where the job stores checkpoints, if anywhere.
    """

    def __init__(self, callbacks: Callbacks, url: str | None) -> None:
        self._callbacks = callbacks
        self._url = url or ""
        self._generation = 0
        self._committed_step = -1
        self._stored_step = -1
        self._left: tuple[int, float] | None = None

    def leave(self, step: int, now_s: float) -> None:
        """Note that this process leaves a generation, with so many steps completed."""
        # If the next generation ends before it runs, what was undone began here.
        if self._left is None:
            self._left = (step, now_s)

    def enter(self, entered: GenerationEntered, now_s: float) -> None:
        """Tell of a generation, and of the recovery if it is not the first."""
        left, self._left = self._left, None
        self._generation = entered.generation
        # Steps may be done again: what was committed before shows nothing about them.
        self._committed_step = -1
        # What was stored of later steps has been found damaged, if it is not what was loaded.
        self._stored_step = min(self._stored_step, entered.step)
        if self._callbacks.on_generation is not None:
            self._callbacks.on_generation(entered)
        if self._callbacks.on_recovery is not None and entered.generation > 1:
            undone = None if left is None else max(0, left[0] - entered.step)
            seconds = None if left is None else now_s - left[1]
            self._callbacks.on_recovery(Recovered(entered, undone, seconds))

    def reject(self, rejected: RejectedStep) -> None:
        """Tell of a step that was rejected before this generation."""
        if self._callbacks.on_rejected_step is not None:
            self._callbacks.on_rejected_step(rejected)

    def progress(self, committed_step: int, stored_step: int) -> None:
        """Report a snapshot and a checkpoint that are newer than the last reported; -1: none."""
        if committed_step > self._committed_step:
            self._committed_step = committed_step
            if self._callbacks.on_snapshot is not None:
                self._callbacks.on_snapshot(SnapshotCommitted(self._generation, committed_step))
        if stored_step > self._stored_step:
            self._stored_step = stored_step
            if self._callbacks.on_checkpoint is not None:
                self._callbacks.on_checkpoint(CheckpointStored(stored_step, self._url))
