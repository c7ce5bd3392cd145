"""Takes snapshots of one worker's training state in one generation.

The state does not change between two optimizer steps, so the copy begins when a step ends and must
be complete just before an optimizer writes again (DataStates-LLM, arXiv 2406.10707). State that
other code than optimizers may write to at any time (buffers, averages of the weights) is copied
synchronously, and so is all state once a write during a copy has been seen.

Which snapshots begin is decided by `snapshot_agreement`: this module tells it what happens, copies,
and reduces the ranks' votes during the backward pass or the optimizer's step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import astuple

import torch
import torch.distributed as dist

from keepstep import monitor
from keepstep.checkpoint.errors import SnapshotUnavailable, StateChanged
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS, ControlGroup
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.snapshot_agreement import (
    Agreement,
    Event,
    Fate,
    Final,
    Moment,
    Phase,
    Reduced,
    SnapshotBegan,
    StepBegan,
    Votes,
    advance,
)
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.training_state import TrainingState
from keepstep.elastic.worker.messages import Assignment
from keepstep.elastic.worker.peer_failure import is_peer_failure
from keepstep.elastic.worker.session import Session

log = logging.getLogger("keepstep")


class SnapshotManager:
    """The snapshots of one worker's training state in one generation, until `close`.

    Args:
        training: the state.
        device: where it is.
        assignment: the generation. Without a snapshot server in it nothing is copied.
        session: with the agent.
        interval: how often a snapshot is wanted.
        ranks: all ranks of the generation; None: those of the default group.
        step: the step that the state was restored at.
        copies_synchronously: training waits for each copy from the beginning.
    """

    def __init__(
        self,
        *,
        training: TrainingState,
        device: torch.device,
        assignment: Assignment,
        session: Session,
        interval: SnapshotInterval,
        ranks: ControlGroup | None = None,
        step: int = 0,
        copies_synchronously: bool = False,
    ) -> None:
        self._training = training
        self._generation = assignment.generation
        self._session = session
        self._ranks = ranks or CONTROL_GROUPS.of()
        self._snapshot_interval = interval
        self._blocked_s = 0.0
        self._completed_step = step
        self._client: SnapshotClient | None = None
        self._snapshotter: Snapshotter | None = None
        if assignment.server:
            self._client = SnapshotClient(assignment.server, bytes.fromhex(assignment.secret))
            self._snapshotter = Snapshotter(
                self._client,
                assignment.generation,
                assignment.rank,
                device,
                lambda: session.may_seal(assignment.generation),
            )
        self._agreement = Agreement(
            copies_synchronously=copies_synchronously or training.may_replay_writes
        )
        self._reduction: tuple[torch.Tensor, dist.Work | None] | None = None
        self._hooks = (
            *(
                optimizer.register_step_pre_hook(lambda *_: self._before_write())
                for optimizer in training.optimizers
            ),
            training.model.register_forward_hook(self._after_forward),
        )

    @property
    def copies_synchronously(self) -> bool:
        """Whether training waits for each copy: the state was written to during one, or may be."""
        return self._agreement.copies_synchronously

    @property
    def is_ending(self) -> bool:
        """Whether all ranks have agreed that the generation ends after the step just completed."""
        return self._agreement.outcome.is_ending

    @property
    def is_stopping(self) -> bool:
        """Whether all ranks know that one of them wanted to stop when that step began."""
        return self._agreement.outcome.is_stopping

    def begin_step(self, *, stops: bool = False) -> None:
        """Begin a step: from here to `complete_step` all ranks run the same collectives.

        Args:
            stops: this rank wants the step to be the last of the pass over the data.
        """
        self._apply(StepBegan(stops))

    def complete_step(self, position: Position) -> bool:
        """Complete a step at `position`; return whether the ranks agreed on a snapshot of it."""
        self._completed_step = position.step
        self._snapshot_interval.note_step(time.monotonic())
        self._receive_result()
        if self._agreement.phase is Phase.EARLY:
            # No optimizer has written here. Others' may have, and they have agreed again.
            self._wait()
            self._apply(Moment.WRITES_OVER)
            self._receive_result()
        self._apply(Moment.STEP_DONE)
        return self._agreement.outcome.takes_snapshot

    def take_agreed(self, position: Position) -> None:
        """Begin the snapshot that `complete_step` has returned True for."""
        began_s = time.monotonic()
        self.snapshot(position)
        self._blocked_s = time.monotonic() - began_s

    def snapshot(self, position: Position) -> None:
        """Begin to copy the current state; the last snapshot is committed, or discarded by all."""
        with monitor.phase(monitor.Phase.CHECKPOINT):
            self._begin_copy(position)
        if self._agreement.copies_synchronously:
            self._wait()

    def seal_before_closing(
        self, position: Position, wait_for_commit: Callable[[int], bool]
    ) -> None:
        """Seal a snapshot at `position` before an orderly end of the generation; between steps.

        Args:
            position: position of the state.
            wait_for_commit: waits for the commit of a step; False if it will not be committed.
        """
        while True:
            self._wait()
            last_step = self._agreement.last_step
            match self._agreement.before_end(
                position.step, is_committed=self._session.is_committed(last_step)
            ):
                case Final.NOTHING:
                    return
                case Final.BEGIN:
                    self.snapshot(position)
                case Final.AWAIT_COMMIT:
                    if not wait_for_commit(last_step):
                        return

    def commit_final_snapshot(
        self, position: Position, wait_for_commit: Callable[[int], bool]
    ) -> bool:
        """Commit the state at `position`, which must not change any more; called by all ranks.

        Returns False if the generation closes before the commit.
        """
        try:
            self.seal_before_closing(position, wait_for_commit)
            self._apply(Moment.LOOP_DONE)
            self._receive_result()
            if self._agreement.fate is Fate.DISCARDED:
                self._retake(position)
        except SnapshotUnavailable:
            # Refused, because something broke and all are fenced.
            if self._session.is_closing(self._generation):
                return False
            raise
        except RuntimeError as error:
            if is_peer_failure(error):
                return False
            raise
        return wait_for_commit(position.step)

    def close(self) -> None:
        """Wait for a copy in progress, then release all resources."""
        for hook in self._hooks:
            hook.remove()
        if self._snapshotter is not None:
            self._snapshotter.close()
        if self._client is not None:
            self._client.close()

    def _after_forward(self, *_: object) -> None:
        # A graph that is compiled whole has no place for this: it begins before the optimizer then.
        if not torch.compiler.is_compiling():
            self._apply(Moment.FORWARD_DONE)

    def _before_write(self) -> None:
        if self._agreement.phase is Phase.OUTSIDE:
            # This rank would then be a reduction ahead of ranks whose step a failure interrupted.
            raise UsageError(
                "an optimizer's step was called outside of a step of the job, where a recovery "
                "loses it: put it inside `with job.step()`"
            )
        began_s = time.monotonic()
        self._wait()
        if not self._agreement.is_written:
            if self._blocked_s:
                self._snapshot_interval.note_snapshot(self._blocked_s + time.monotonic() - began_s)
                self._blocked_s = 0.0
            self._receive_result()
        self._apply(Moment.BEFORE_WRITE)

    def _apply(self, event: Event) -> None:
        before, self._agreement = self._agreement, advance(self._agreement, event)
        if self._agreement.reductions != before.reductions:
            self._start_reduction()

    def _start_reduction(self) -> None:
        last_step = self._agreement.last_step
        votes = self._agreement.vote(
            is_wanted=self._snapshot_interval.is_wanted(self._completed_step + 1, last_step),
            is_committed=self._session.is_committed(last_step),
            is_closing=self._session.is_closing(self._generation),
        )
        values = torch.tensor([int(vote) for vote in astuple(votes)])
        work = self._ranks.begin_minimum(values) if self._ranks.size > 1 else None
        self._reduction = (values, work)

    def _receive_result(self) -> None:
        """Wait for the result of the reduction under way, if there is one."""
        if self._reduction is None:
            return
        (values, work), self._reduction = self._reduction, None
        if work is not None:
            work.wait()
        self._apply(Reduced(Votes.of(map(bool, values.tolist()))))

    def _begin_copy(self, position: Position, agree: Callable[[bool], bool] | None = None) -> None:
        assert self._agreement.may_begin(
            is_committed=self._session.is_committed(self._agreement.last_step)
        )
        if self._agreement.copies_synchronously or agree is not None:
            # A step may replace the memory of its tensors, which also makes copies synchronous.
            self._training.invalidate_if_moved()
        if self._snapshotter is not None:
            live = self._training.capture(position)
            self._snapshotter.start(
                position.step,
                live.tensors,
                live.documents,
                discard_uncommitted=self._agreement.fate is Fate.DISCARDED,
                agree=agree,
            )
        self._apply(SnapshotBegan(position.step))

    def _retake(self, position: Position) -> None:
        """Take the final snapshot again: the state was written to on a rank during the first copy.

        Raises:
            StateChanged: it was again, on any rank.
        """
        with monitor.phase(monitor.Phase.CHECKPOINT):
            self._begin_copy(position, agree=self._are_all)
            if self._snapshotter is not None:
                self._snapshotter.wait()

    def _wait(self) -> None:
        """Wait for the copy in progress."""
        if self._snapshotter is None:
            return
        try:
            self._snapshotter.wait()
        except StateChanged as changed:
            if not self._agreement.copies_synchronously:
                log.warning(
                    "%s: from now on training waits while state is copied. To avoid this, write to "
                    "the state only inside `with job.step()`, or before `step_done()`",
                    changed,
                )
            self._apply(Moment.COPY_TORN)

    def _are_all(self, holds: bool) -> bool:
        """Return whether something holds on all ranks; a collective."""
        return all(self._ranks.gather(holds))
