"""Begins, judges and completes the steps of a job, or recovers from what has ended one.

It serves `Step`, and knows which batch the next step is of. The job reads batches and recovers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from keepstep import monitor
from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import ReplicasDiverged, UsageError
from keepstep.elastic.trainer.bad_steps import RejectedStep, StepJudge
from keepstep.elastic.trainer.events import EventReporter
from keepstep.elastic.trainer.generation_end import is_from_generation_end
from keepstep.elastic.trainer.generation_state import GenerationState
from keepstep.elastic.trainer.passes import Passes
from keepstep.elastic.trainer.process_groups import World
from keepstep.elastic.trainer.replicas import ReplicaCheck
from keepstep.elastic.worker.messages import ReplicasCompared, SnapshotIntervalChosen, Stepped
from keepstep.elastic.worker.session import Session, wall_clock_s


class StepUndone(Exception):
    """Leaves a step that this rank has rejected; `Step` catches it."""

    def __init__(self, rejected: RejectedStep) -> None:
        super().__init__(str(rejected))


class StepControl:
    """The steps of a job on one worker.

    Args:
        session: with the agent.
        state: of the current generation.
        passes: the job's passes over the data.
        replicas: compares the replicas' states.
        judge: judges steps, if `join` was given a policy.
        events: reports what is committed and stored.
        recover: leaves the generation, which something has ended, and enters the next one.
    """

    def __init__(
        self,
        *,
        session: Session,
        state: GenerationState,
        passes: Passes,
        replicas: ReplicaCheck,
        judge: StepJudge | None,
        events: EventReporter,
        recover: Callable[[BaseException], None],
    ) -> None:
        self._session = session
        self._state = state
        self._passes = passes
        self._replicas = replicas
        self._judge = judge
        self._events = events
        self._recover = recover
        self._rejected: RejectedStep | None = None
        self._batch_position = Position()
        self._reported_first_step = False
        self._marked_step = 0
        self.batch_generation: int | None = None
        """The generation in which the loop's batch was read; None outside of the loop."""
        self.loss_scale = 1.0
        """See `Step.loss_scale`."""
        self.has_begun = False
        """Whether the current pass has begun a step in this process."""

    @property
    def world(self) -> World:
        """The ranks, mesh and device of the current generation."""
        return self._state.world

    @property
    def completed(self) -> int:
        """Number of steps completed since training began."""
        return self._state.position.step

    def enter_generation(self) -> None:
        """Note that a generation is entered: its first step is reported."""
        self._reported_first_step = False
        self._marked_step = 0

    def mark(self) -> None:
        """Report the step that begins to the monitor, once."""
        number = self.completed + 1
        if self._marked_step != number:
            self._marked_step = number
            monitor.begin_step(number)

    def take_batch(self, position: Position, loss_scale: float) -> None:
        """Note the batch that the loop is given, which the next step is of."""
        self.batch_generation = self.world.generation
        self._batch_position = position
        self.loss_scale = loss_scale

    def begin(self) -> None:
        """Begin a step and clear gradients.

        Raises:
            UsageError: the loop has no batch for it.
        """
        if self.batch_generation is None:
            raise UsageError(
                "job.step() is called outside of a loop over job.batches, which counts the batches "
                "that steps have consumed and ends a generation in good order: call it inside, "
                "once for each batch, before the next batch is read (to read ahead, give "
                "`workers`)"
            )
        if self.batch_generation != self.world.generation:
            raise UsageError(
                "the job has recovered since this batch was read, and goes on elsewhere: go to the "
                "next batch where a step or a guard is not completed (`if not guard.completed: "
                "continue`)"
            )
        if self._batch_position != self._state.position:
            # Each step counts one batch: a recovery would leave out batches that were never read.
            raise UsageError(
                "this batch has had its step: put all that a batch changes, such as the steps of "
                "several optimizers, into one `with job.step()`, and go to the next batch after it"
            )
        self.mark()
        self.has_begun = True
        self._rejected = None
        self._state.snapshots.begin_step(stops=self._passes.is_stop_requested(self._state.position))
        for optimizer in self._state.training.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def end(self, error: BaseException | None) -> bool:
        """Complete the step or recover from its failure; return whether `error` is handled."""
        try:
            is_handled = self._complete_or_recover(error)
        finally:
            # The loop may now do something else for long, such as evaluation.
            self._marked_step = 0
            monitor.end_step()
        if error is None or is_handled:
            self.report_progress()
        return is_handled

    def report_progress(self) -> None:
        """Report what is committed and stored to the callbacks."""
        self._events.progress(self._session.committed_step, self._session.stored_step)

    def judge(self, values: Mapping[str, float]) -> None:
        """Judge what a step has reported."""
        reason = self._own_judge().judge(self.completed + 1, values)
        if reason:
            self.reject(reason)

    def reject(self, reason: str) -> NoReturn:
        """Undo the step that is under way."""
        judge = self._own_judge()
        data = self._passes.current
        assert data is not None, "a step has a batch of a pass"
        self._rejected = judge.reject(
            reason,
            step=self.completed + 1,
            batch=self._state.position.batch,
            begin=data.begin,
            generation=self.world.generation,
            rank=self.world.rank,
        )
        raise StepUndone(self._rejected)

    def is_from_generation_end(self, error: Exception) -> bool:
        """Whether the end of the generation caused an error, and not the training code."""
        return is_from_generation_end(self._session, self.world.generation, error)

    def compare_replicas(self, *, precedes_snapshot: bool) -> ReplicasDiverged | None:
        """Compare the replicas if it is time to; return what makes the job roll back, if it must.

        Args:
            precedes_snapshot: this state is what a snapshot will hold.
        """
        comparison = self._replicas.run_if_due(self.completed, precedes_snapshot=precedes_snapshot)
        if comparison is None:
            return None
        if self.world.rank == 0:
            self._session.report(
                ReplicasCompared(generation=self.world.generation, comparison=comparison)
            )
        rolls_back = comparison.differing and self._replicas.rolls_back
        return ReplicasDiverged(comparison.finding) if rolls_back else None

    def _complete_or_recover(self, error: BaseException | None) -> bool:
        if self._rejected is not None:
            # Also if the loop has caught the exception.
            self._recover(StepUndone(self._rejected))
            return True
        if error is None:
            try:
                self._complete()
            except (RuntimeError, SnapshotUnavailable) as broken:
                # The agreement on the next snapshot is a collective too; and a copy that training
                # waits for is refused once the generation is fenced.
                if not self.is_from_generation_end(broken):
                    raise
                self._recover(broken)
            return True
        if isinstance(error, Exception) and self.is_from_generation_end(error):
            self._recover(error)
            return True
        return False

    def _complete(self) -> None:
        self._state.position = Position(
            self._state.position.step + 1, self._state.position.batch + 1
        )
        generation = self.world.generation
        self._session.progress(generation, self.completed)
        if not self._reported_first_step:
            self._reported_first_step = True
            self._session.report(Stepped(generation=generation, at_s=wall_clock_s()))
        snapshots = self._state.snapshots
        takes_snapshot = snapshots.complete_step(self._state.position)
        if snapshots.is_stopping:
            self._state.position = self._passes.stop(self._state.position)
        # Before the snapshot of the step: a repaired state is what it shall hold.
        divergence = self.compare_replicas(precedes_snapshot=takes_snapshot or snapshots.is_ending)
        if divergence is not None:
            self._recover(divergence)
            return
        if takes_snapshot:
            snapshots.take_agreed(self._passes.located(self._state.position))
        interval_change = self._state.snapshot_interval.notable_change()
        if interval_change is not None:
            every, cost_s = interval_change
            self._session.report(
                SnapshotIntervalChosen(generation=generation, every=every, cost_s=cost_s)
            )

    def _own_judge(self) -> StepJudge:
        if self._judge is None:
            raise UsageError(
                "step.report and step.reject need keepstep.join(..., on_bad_step=BadSteps(...)), "
                "which says what then happens"
            )
        return self._judge
