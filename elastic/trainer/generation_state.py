"""Holds what a worker computes with in a generation: its process groups and the training state.

Every generation, the first one and one after a failure, is entered in the same way: form the
process groups, call the user's `build`, restore the state from the source in the generation
document. When it ends, all live state is dropped; only sealed snapshots are used again.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS
from keepstep.elastic.data import numpy_generator
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import ProcessUnusable, UsageError
from keepstep.elastic.trainer.bad_steps import StepJudge
from keepstep.elastic.trainer.generation_end import report_broken
from keepstep.elastic.trainer.passes import Passes
from keepstep.elastic.trainer.process_groups import ProcessGroups, World
from keepstep.elastic.trainer.replicas import ReplicaCheck
from keepstep.elastic.trainer.restorer import Restorer, report_restored
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.snapshot_manager import SnapshotManager
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.state import Build, InitialExtra, State
from keepstep.elastic.trainer.training_state import TrainingState
from keepstep.elastic.worker import telemetry
from keepstep.elastic.worker.messages import Assignment, Drained, Ready
from keepstep.elastic.worker.session import Session, wall_clock_s
from keepstep.elastic.worker.tracker_environment import tracker_variables
from keepstep.torch_internals import drop_compiled_code

log = logging.getLogger("keepstep")

_JUDGE = "keepstep.bad_steps"
"""Key of the step judge in `State.extra`."""


class GenerationState:
    """A worker's process groups and training state, from one generation to the next.

    Args:
        session: with the agent.
        groups: forms and leaves the process groups.
        build: the user's function that makes model and optimizers.
        checkpoint: the URL that the job stores to, if any.
        start_from: what a new job begins from, if anything.
        snapshot_every: steps between snapshots, or automatic.
        seed: of the generators, at the beginning of each generation.
        passes: the job's passes over the data, which are part of the state.
        replicas: compares the replicas' states.
        judge: judges steps, and is part of the state, if `join` was given a policy.
    """

    def __init__(
        self,
        *,
        session: Session,
        groups: ProcessGroups,
        build: Build,
        checkpoint: str | None,
        start_from: StartFrom | None,
        snapshot_every: int,
        seed: int,
        passes: Passes,
        replicas: ReplicaCheck,
        judge: StepJudge | None,
    ) -> None:
        self._session = session
        self._groups = groups
        self._build = build
        self._checkpoint = checkpoint
        self._start_from = start_from
        self._snapshot_every = snapshot_every
        self._seed = seed
        self._passes = passes
        self._replicas = replicas
        self._judge = judge
        self._world: World | None = None
        self._training: TrainingState | None = None
        self._snapshots: SnapshotManager | None = None
        self._initial_extra = InitialExtra()
        self._copies_synchronously = False
        self._release: Callable[[], None] | None = None
        self.position = Position()
        """Where the training is."""
        self.snapshot_interval = SnapshotInterval(snapshot_every, 0.0)
        """How often a snapshot of the current generation is taken."""
        self.source = ""
        """The origin of the restored state."""

    @property
    def world(self) -> World:
        """The ranks, mesh and device of the current generation."""
        assert self._world is not None, "enter the job with `with`"
        return self._world

    @property
    def training(self) -> TrainingState:
        """The training state of the current generation."""
        assert self._training is not None, "enter the job with `with`"
        return self._training

    @property
    def snapshots(self) -> SnapshotManager:
        """The snapshots of the current generation's training state."""
        assert self._snapshots is not None, "enter the job with `with`"
        return self._snapshots

    def watch_aborts(self) -> None:
        """Have the process groups aborted when the agent says so, until `close`."""
        self._session.on_abort(self._groups.abort, awaits_order=self._groups.awaits_abort_order)

    def enter(self, assignment: Assignment, mesh: Mapping[str, int]) -> None:
        """Form the process groups, build the state and restore it: `position` is where to go on.

        Args:
            assignment: the generation and this worker's place in it.
            mesh: the sizes of the mesh's dimensions, by name.

        Raises:
            SnapshotUnavailable, RankFailed: a node was lost that the state is restored from.
            Exception: what a call of torch.distributed or the user's `build` raises. To go on after
                any of these, `end` this generation.
        """
        if self._session.is_managed:
            # The same names as before: only new ones would move what other threads may be reading.
            os.environ.update(assignment.environment())
            os.environ.update(tracker_variables(assignment, os.environ))
        telemetry.reopen(assignment)
        world = self._world = self._groups.enter(assignment, mesh)
        self._session.report(Ready(generation=assignment.generation, at_s=wall_clock_s()))
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        numpy_generator.seed(self._seed)
        self.snapshot_interval = SnapshotInterval(self._snapshot_every, assignment.failures_per_s)
        state = self._build(world)
        if not isinstance(state, State):
            raise UsageError(
                f"build returned {state if state is None else type(state).__name__}: return "
                "keepstep.State(model, functools.partial(AdamW, lr=1e-3))"
            )
        self._release = state.release
        self._initial_extra.note(state.extra)
        # What outlives a generation begins as in a new process: a step that was undone may have
        # given it tensors, which no snapshot has.
        self._initial_extra.restore(state.extra)
        if self._judge is not None:
            for rejected in CONTROL_GROUPS.of().gather(self._judge.to_json()):
                self._judge.learn(StepJudge.from_json(rejected))
            state = replace(state, extra={**state.extra, _JUDGE: self._judge})
        training = self._training = TrainingState(
            state,
            world.device,
            assignment.rank,
            (world.data_rank, world.data_size),
            is_stage=world.has_stages,
        )
        self._replicas.enter(world, training.replicable)
        restorer = Restorer(
            training=training,
            assignment=assignment,
            checkpoint=self._checkpoint,
            start_from=self._start_from,
            seed=self._seed,
        )
        resumed = restorer.resume(self._newest_step(assignment))
        position = self.position = resumed.position
        self._passes.resume(position)
        if self._judge is not None:
            self._judge.resume(position.step)
        self.source = resumed.source
        report_restored(self._session, assignment, resumed)
        self._snapshots = SnapshotManager(
            training=training,
            device=world.device,
            assignment=assignment,
            session=self._session,
            interval=self.snapshot_interval,
            step=position.step,
            copies_synchronously=self._copies_synchronously,
        )
        if position.step > 0:
            # Protect the state in the new groups at once: until then it depends on what is left of
            # the old groups, and may not survive another loss.
            self._snapshots.snapshot(self._passes.located(position))
        if not resumed.begins:
            # One that begins has no optimizer slots yet, of which ranks may have different ones.
            self._replicas.learn_layouts()

    def end(self, generation: int, error: BaseException | None) -> None:
        """Seal a last snapshot if possible, drop the live state, and report "drained" to the agent.

        After "drained" this worker writes nothing more in this generation. If it ends by an error,
        inside a step, then the state may be half that of the next step, and is not sealed. The
        process ends if it cannot leave the process groups.

        Args:
            generation: the one that is over.
            error: what has ended it; None if it ends in good order.
        """
        if error is None:
            try:
                self._end_in_good_order(generation)
            except (RuntimeError, SnapshotUnavailable) as broken:
                # Something broke while the generation closed in good order: a collective, or what
                # was still being copied is refused because all are fenced.
                error = broken
        if error is not None:
            awaits_order = self._groups.awaits_abort_order
            report_broken(self._session, generation, error, awaits_order=awaits_order)
        if self._groups.awaits_abort_order and (
            error is not None or self._session.is_aborting(generation)
        ):
            self._session.wait_for_abort_order(generation)
        if error is not None:
            forget_locals(error)
        self._leave()
        self._session.report(Drained(generation=generation))

    def close(self) -> None:
        """Leave the last generation, of which all is committed."""
        try:
            # A peer may still need what this rank's device computes.
            self._groups.finish()
        except RuntimeError as lost:
            log.warning("a peer was lost at the end of the job: %s", lost)
        self._session.on_abort(None, awaits_order=False)
        self._drop_state()
        try:
            self._groups.leave()
        except ProcessUnusable as unusable:
            # No other generation follows, and the state is safe.
            log.warning("%s; the job is done all the same", unusable)

    def _newest_step(self, assignment: Assignment) -> int | None:
        """Return the newest step to go on from, if a step was rejected after an older one."""
        if self._judge is None or assignment.resume is None:
            return None
        return self._judge.newest_step(assignment.resume.snapshot.generation)

    def _end_in_good_order(self, generation: int) -> None:
        """Seal the last snapshot, and wait until the peers have computed theirs."""
        if self._snapshots is None or self._session.is_aborting(generation):
            return
        self._snapshots.seal_before_closing(
            self._passes.located(self.position),
            lambda step: self._session.wait_for_commit(step, generation, also_closing=True),
        )
        self._groups.finish()

    def _leave(self) -> None:
        """Drop the live state and leave the process groups; the process ends if it cannot."""
        self._drop_state()
        try:
            self._groups.leave()
        except ProcessUnusable as unusable:
            self._session.exit_for_replacement(str(unusable), is_fault=unusable.is_fault)

    def _drop_state(self) -> None:
        """Begin to abort the process groups, and drop all that holds them.

        The abort begins first: it wakes the peers that wait for this rank, and frees what waits
        here. It may wait in turn for CUDA graphs that are dropped here.
        """
        self._groups.abort()
        release, self._release = self._release, None
        if release is not None:
            release()
        if self._snapshots is not None:
            self._copies_synchronously = self._snapshots.copies_synchronously
            self._snapshots.close()
        self._snapshots = self._training = None
        self._replicas.leave()
        drop_compiled_code()
        gc.collect()


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of all frames that an exception, and its causes, have left.

    While an exception is handled its frames keep the model, gradients and activations: a device
    may lack the memory to hold the next generation's state too. Frames that still run keep theirs.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        failure = pending.pop()
        if failure is None or id(failure) in seen:
            continue
        seen.add(id(failure))
        traceback.clear_frames(failure.__traceback__)
        pending += [failure.__cause__, failure.__context__]
