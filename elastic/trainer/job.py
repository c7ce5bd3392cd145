"""Runs a training loop under keepstep: the `Job` that `join` returns.

Its process groups and training state are those of one generation (`generation_state`): the job has
them entered, computes steps, and has them dropped when the generation ends.

A peer's failure appears as an exception of a collective inside `Job.step` or `Job.guard`. Their
exit then leaves the generation, waits for the next one and enters it. The batch iterator, which
also belongs to the job, yields the batch of the restored position next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep import monitor
from keepstep.checkpoint.errors import RankFailed, SnapshotUnavailable
from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.datasets import Dataset, Source, Stream
from keepstep.elastic.data.position import Position
from keepstep.elastic.errors import ReplicasDiverged, UsageError
from keepstep.elastic.trainer.bad_steps import BadSteps, RejectedStep, StepJudge
from keepstep.elastic.trainer.events import Callbacks, EventReporter, GenerationEntered
from keepstep.elastic.trainer.generation_state import GenerationState
from keepstep.elastic.trainer.guard import Guard
from keepstep.elastic.trainer.mesh_rule import MeshRule
from keepstep.elastic.trainer.passes import Passes
from keepstep.elastic.trainer.process_groups import ProcessGroups, World
from keepstep.elastic.trainer.replicas import OnDivergence, ReplicaCheck
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.state import Build
from keepstep.elastic.trainer.step import Step, StepUndone
from keepstep.elastic.worker.messages import (
    Assignment,
    Finishing,
    ReplicasCompared,
    SnapshotIntervalChosen,
    Stepped,
)
from keepstep.elastic.worker.peer_failure import is_peer_failure
from keepstep.elastic.worker.session import Session, wall_clock_s

log = logging.getLogger("keepstep")

T = TypeVar("T")
_END_OF_DATA = object()
_NO_CALLBACKS = Callbacks()

_FENCED_S = 2.0
"""For so long a node may refuse copies before its ranks are told that the generation closes."""


class Job:
    """A training job as one worker sees it, created by `join`."""

    def __init__(
        self,
        *,
        session: Session,
        groups: ProcessGroups,
        build: Build,
        mesh: MeshRule,
        checkpoint: str | None,
        start_from: StartFrom | None,
        snapshot_every: int,
        seed: int,
        compare_replicas_every: int | None,
        on_divergence: OnDivergence,
        on_bad_step: BadSteps | None = None,
        callbacks: Callbacks = _NO_CALLBACKS,
    ) -> None:
        self._session = session
        self._events = EventReporter(callbacks, checkpoint)
        self._mesh = mesh
        self._checkpoint = checkpoint
        self._seed = seed
        self._passes = Passes()
        self._replicas = ReplicaCheck(compare_replicas_every, on_divergence)
        self._judge = StepJudge(on_bad_step) if on_bad_step is not None else None
        self._state = GenerationState(
            session=session,
            groups=groups,
            build=build,
            checkpoint=checkpoint,
            start_from=start_from,
            snapshot_every=snapshot_every,
            seed=seed,
            passes=self._passes,
            replicas=self._replicas,
            judge=self._judge,
        )
        self._rejected: RejectedStep | None = None
        self._left_out_guards = 0
        self._has_begun_step = False
        self._has_warned_of_guard = False
        self._batch_generation: int | None = None
        self._pass_generation = 0
        self._batch_position = Position()
        self._reported_first_step = False
        self._marked_step = 0
        self._loss_scale = 1.0

    def __enter__(self) -> Self:
        self._state.watch_aborts()
        self._enter(newer_than=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an exception the process groups stay: peers would report broken collectives before
        # this worker reports the cause.
        if isinstance(error, NameError) and self._left_out_guards:
            error.add_note(
                f"This process has begun the script anew, and left out {self._left_out_guards} "
                "guards of passes that were over: what the script needs of them afterwards belongs "
                "into State.extra, or into build, which runs in every process."
            )
        if error is None:
            self._finish()
            self._state.close()
        elif not self._session.is_managed and self.world.world_size == 1:
            # A notebook may join again.
            self._state.close()

    @property
    def world(self) -> World:
        """The ranks, mesh and device of the current generation."""
        return self._state.world

    @property
    def model(self) -> nn.Module:
        """The model of the current generation: a new object after every change of membership."""
        return self._state.training.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the current generation, the first if there are several."""
        return self._state.training.optimizers[0]

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers of the current generation."""
        return self._state.training.optimizers

    @property
    def scheduler(self) -> LRScheduler | None:
        """The learning-rate scheduler of `optimizer`, if `build` returned one."""
        return next(iter(self.schedulers), None)

    @property
    def schedulers(self) -> tuple[LRScheduler, ...]:
        """The learning-rate schedulers, one for each optimizer; empty if `build` returned none."""
        return self._state.training.schedulers

    @property
    def steps(self) -> int:
        """Number of optimizer steps completed since training began."""
        return self._state.position.step

    def batches(
        self,
        dataset: Dataset[T] | Stream[T] | Source[T],
        global_batch: int,
        *,
        micro_batch: int | None = None,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = True,
        collate: Callable[[list[T]], Any] | None = None,
        workers: int = 0,
        loader_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Any]:
        """Yield this rank's share of each global batch.

        Samples, their order and what is drawn at random to make them are the same for any world
        size; what a dataset with `__getitems__` draws is so for the same world size only. After a
        recovery the iterator continues at the restored position. Each call is one pass with an
        order of its own; in a script that calls it once per epoch, passes that were completed
        before a restart yield nothing.

        Args:
            dataset: an object with `len` and indexing by int; a source that is read in partitions
                (`ShardedStream`, `SplitStream`, `Mixture`, `Packed`, `Shuffled`); or any other
                iterable, also torch's IterableDataset, of which every rank reads all and keeps its
                share. An iterable must yield the same samples on all ranks and each time that it is
                iterated. With `state_dict` and `load_state_dict` it resumes where it was, else it
                is read again up to there.
            global_batch: samples per step over all ranks. If it is not a multiple of the
                data-parallel size, shares differ by one sample: multiply the loss by
                `step.loss_scale` to keep the average exact.
            micro_batch: yield a list of `MicroBatch` instead of a batch, each of at most so many
                samples: as few as possible, and the same number on all ranks.
            epochs: number of passes through the dataset; an epoch's last, incomplete batch is
                dropped.
            steps: number of steps after which the pass ends; overrides `epochs`. What has no length
                needs it, and is read again when it ends.
            shuffle: permute each epoch by the job's seed, of a `ShardedStream` the order of its
                shards; an iterable is read in its own order.
            collate: makes a batch of a list of samples; default as in torch's DataLoader.
            workers: number of loader processes, as in torch's DataLoader. Of a source, each reads
                some of the rank's partitions, so there are no more than these; of an iterable one.
            loader_options: further arguments of torch's DataLoader, such as `pin_memory` and
                `prefetch_factor`.

        Raises:
            UsageError: the batch is larger than the dataset or smaller than the data-parallel
                size, what has no length is given without `steps` or can be read only once, the pass
                before is not over, or the job resumes within a pass that had another dataset length
                or global batch.
        """
        data = DataPass(
            self._passes.place.count,
            self._passes.place.end,
            self._seed,
            dataset,
            global_batch,
            micro_batch=micro_batch,
            epochs=epochs,
            steps=steps,
            shuffle=shuffle,
            collate=collate,
            workers=workers,
            loader_options=loader_options,
        )
        position = self._state.position
        if position.batch < data.begin:
            if self._pass_generation != self.world.generation:
                # The script counted steps of the pass before that were undone meanwhile.
                self._restart_script("steps of the pass before were undone")
            raise UsageError(
                f"job.batches was called while {data.begin - position.batch} global batches of the "
                "pass before are left: its loop is still running, or was left early, as by `break`;"
                " read one pass at a time, and end it early by job.stop()"
            )
        data.check_continues(position)
        self._passes.begin(data)
        self._pass_generation = self.world.generation
        try:
            yield from self._batches_of(data)
        finally:
            # Also by `break`, or by an exception in the loop.
            self._passes.place.leave_loop()
            self._batch_generation = None

    def _batches_of(self, data: DataPass[Any]) -> Iterator[Any]:
        """Yield this rank's share of each global batch of a pass, from the position on."""
        self._has_begun_step = False
        while self._state.position.batch < data.end:
            generation, yielded = self.world.generation, 0
            loader = data.from_position(
                self._state.position, self.world.data_rank, self.world.data_size
            )
            while True:
                if self._state.position.batch < data.end:
                    # For the monitor, a step begins with the wait for its data.
                    self._mark_step()
                batch = next(loader, _END_OF_DATA)
                if batch is _END_OF_DATA:
                    break
                before = self._state.position
                if self._judge is not None and self._judge.is_skipped(before.batch):
                    self._state.position = replace(before, batch=before.batch + 1)
                    continue
                self._loss_scale = data.loss_scale(self.world.data_rank, self.world.data_size)
                yielded += 1
                self._batch_generation = generation
                self._batch_position = before
                yield batch
                if self.world.generation == generation and self._state.snapshots.is_ending:
                    # Not at the end of the step: the loop's code after it uses that step's world.
                    self._recover(None)
                if self.world.generation != generation:
                    break
                if yielded == 2 and self.steps == 0 and not self._has_begun_step:
                    # One batch may be left out.
                    raise UsageError(
                        "the loop over job.batches has taken two batches without a step, so that "
                        "nothing of it would be protected: put what trains into "
                        "`with job.step() as step:`, once for each batch"
                    )
                if self._state.position == before:
                    # The loop skipped this batch: it did not run a step.
                    self._state.position = replace(before, batch=before.batch + 1)
                if self._state.position.batch >= data.end:
                    break

    def step(self) -> Step:
        """Return the context of one optimizer step; see `Step`.

        Entered outside of a loop over `batches`, or twice for a batch, it raises `UsageError`.
        """
        return Step(self)

    def guard(self) -> Guard:
        """Return a context for collectives outside of steps, such as an evaluation's; see `Guard`.

        All ranks must run the same collectives in it, as in a step.
        """
        is_over = self._passes.place.come_to_guard(self._state.position.batch)
        return Guard(self, is_over=is_over)

    def _complete_guard(self) -> None:
        """Take note of the end of a guard; for `Guard`."""
        self._passes.place.complete_guard()
        self._session.progress(self.world.generation, self.steps)

    def stop(self) -> None:
        """End the pass over the data after the next step that begins, on all ranks alike.

        One rank may ask for it alone, at any time; the ranks agree in the next step. That the pass
        is over is part of the state after that step. Where a recovery returns to a state from
        before the call, the loop comes to the reason for it again. What is asked for in the last
        step of a pass has no effect.
        """
        self._passes.request_stop(self._state.position)

    def _mark_step(self) -> None:
        """Report the step that begins to the monitor, once."""
        number = self._state.position.step + 1
        if self._marked_step != number:
            self._marked_step = number
            monitor.begin_step(number)

    def _begin_step(self) -> None:
        """Begin a step and clear gradients; for `Step`."""
        if self._batch_generation is None:
            raise UsageError(
                "job.step() is called outside of a loop over job.batches, which counts the batches "
                "that steps have consumed and ends a generation in good order: call it inside, "
                "once for each batch, before the next batch is read (to read ahead, give "
                "`workers`)"
            )
        if self._batch_generation != self.world.generation:
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
        self._mark_step()
        self._has_begun_step = True
        self._rejected = None
        self._state.snapshots.begin_step(stops=self._passes.is_stop_requested(self._state.position))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _end_step(self, error: BaseException | None) -> bool:
        """Complete the step or recover from its failure, for `Step`; True if `error` is handled."""
        try:
            is_handled = self._complete_or_recover(error)
        finally:
            # The loop may now do something else for long, such as evaluation.
            self._marked_step = 0
            monitor.end_step()
        if error is None or is_handled:
            self._report_progress()
        return is_handled

    def _report_progress(self) -> None:
        self._events.progress(self._session.committed_step, self._session.stored_step)

    def _complete_or_recover(self, error: BaseException | None) -> bool:
        if self._rejected is not None:
            # Also if the loop has caught the exception.
            self._recover(StepUndone(self._rejected))
            return True
        if error is None:
            try:
                self._complete_step()
            except (RuntimeError, SnapshotUnavailable) as broken:
                # The agreement on the next snapshot is a collective too; and a copy that training
                # waits for is refused once the generation is fenced.
                if not self._is_from_generation_end(broken):
                    raise
                self._recover(broken)
            return True
        if isinstance(error, Exception) and self._is_from_generation_end(error):
            self._recover(error)
            return True
        return False

    def _is_from_generation_end(self, error: Exception) -> bool:
        """Whether the end of the generation caused an error, and not the training code."""
        if not self._session.is_managed:
            return False
        generation = self.world.generation
        if is_peer_failure(error) or self._session.is_closing(generation):
            return True
        return isinstance(error, SnapshotUnavailable) and self._session.wait_for_closing(
            generation, _FENCED_S
        )

    def _complete_step(self) -> None:
        self._state.position = Position(
            self._state.position.step + 1, self._state.position.batch + 1
        )
        generation = self.world.generation
        self._session.progress(generation, self.steps)
        if not self._reported_first_step:
            self._reported_first_step = True
            self._session.report(Stepped(generation=generation, at_s=wall_clock_s()))
        snapshots = self._state.snapshots
        takes_snapshot = snapshots.complete_step(self._state.position)
        if snapshots.is_stopping:
            self._state.position = self._passes.stop(self._state.position)
        # Before the snapshot of the step: a repaired state is what it shall hold.
        divergence = self._compare_replicas(takes_snapshot or snapshots.is_ending)
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

    def _judge_step(self, values: Mapping[str, float]) -> None:
        """Judge what a step has reported; for `Step`."""
        reason = self._own_judge().judge(self._state.position.step + 1, values)
        if reason:
            self._reject_step(reason)

    def _reject_step(self, reason: str) -> NoReturn:
        """Undo the step that is under way; for `Step`."""
        judge = self._own_judge()
        data = self._passes.current
        assert data is not None, "a step has a batch of a pass"
        self._rejected = judge.reject(
            reason,
            step=self._state.position.step + 1,
            batch=self._state.position.batch,
            begin=data.begin,
            generation=self.world.generation,
            rank=self.world.rank,
        )
        raise StepUndone(self._rejected)

    def _own_judge(self) -> StepJudge:
        if self._judge is None:
            raise UsageError(
                "step.report and step.reject need keepstep.join(..., on_bad_step=BadSteps(...)), "
                "which says what then happens"
            )
        return self._judge

    def _compare_replicas(self, precedes_snapshot: bool) -> ReplicasDiverged | None:
        """Compare the replicas if it is time to; return what makes the job roll back, if it must.

        Args:
            precedes_snapshot: this state is what a snapshot will hold.
        """
        comparison = self._replicas.run_if_due(self.steps, precedes_snapshot=precedes_snapshot)
        if comparison is None:
            return None
        if self.world.rank == 0:
            self._session.report(
                ReplicasCompared(generation=self.world.generation, comparison=comparison)
            )
        rolls_back = comparison.differing and self._replicas.rolls_back
        return ReplicasDiverged(comparison.finding) if rolls_back else None

    def _enter(self, newer_than: int) -> None:
        """Enter the next generation; if it fails before it runs, enter the one after it.

        Args:
            newer_than: the last generation that was entered.
        """
        while True:
            assignment = self._session.wait_for_assignment(newer_than)
            newer_than = assignment.generation
            sizes = self._mesh.sizes(assignment.world_size)
            if sizes is None:
                self._wait_for_other_ranks(assignment)
                continue
            self._reported_first_step = False
            self._marked_step = 0
            try:
                self._state.enter(assignment, sizes)
            except Exception as error:
                # A node that holds the state may be lost while the state is restored from it; and
                # an abort leaves PyTorch's process groups in a state in which any call may fail.
                is_elsewhere = isinstance(error, SnapshotUnavailable | RankFailed)
                if not (
                    is_elsewhere or is_peer_failure(error) or self._session.is_closing(newer_than)
                ):
                    raise
                self._state.end(newer_than, error)
            else:
                self._report_entry(assignment)
                return

    def _wait_for_other_ranks(self, assignment: Assignment) -> None:
        """Wait for the end of a generation that the mesh has no places for.

        Its ranks were chosen before any worker knew the mesh. The leader ends it once it has heard.
        """
        log.info(
            "mesh= does not fit %d ranks; the job goes on with a number that fits",
            assignment.world_size,
        )
        self._session.wait_for_closing(assignment.generation)
        self._state.end(assignment.generation, None)

    def _report_entry(self, assignment: Assignment) -> None:
        entered = GenerationEntered(
            generation=assignment.generation,
            rank=assignment.rank,
            world_size=assignment.world_size,
            step=self.steps,
            source=self._state.source,
        )
        self._events.enter(entered, time.monotonic())
        for rejected in self._judge.take_untold() if self._judge is not None else ():
            if assignment.rank == 0:
                log.warning("%s", rejected)
            self._events.reject(rejected)

    def _recover(self, error: BaseException | None) -> None:
        """Leave the current generation and enter the next one, or begin the script anew in it.

        Args:
            error: what has ended the generation; None if it ends in good order.
        """
        self._enter(self._leave(error))
        reason = self._passes.place.reason_to_begin_anew(self._state.position.batch)
        if reason:
            self._restart_script(reason)

    def _leave(self, error: BaseException | None) -> int:
        """Leave the current generation, as in `_recover`, and return its number."""
        generation = self.world.generation
        self._events.leave(self.steps, time.monotonic())
        self._state.end(generation, error)
        return generation

    def _enter_guard(self, *, is_unconditional: bool) -> None:
        """Begin a guard; for `Guard`.

        Args:
            is_unconditional: the script has not asked whether it is completed already.
        """
        self._session.progress(self.world.generation, self.steps)
        place = self._passes.place
        if place.is_in_loop and self._batch_generation not in (None, self.world.generation):
            # Ranks that are new go on with the next batch.
            self._restart_script(
                "a guard in the loop was entered with the batch of a step or guard that was not "
                "completed; to go on instead, the script asks `completed` of these"
            )
        if is_unconditional and not place.is_in_loop and not self._has_warned_of_guard:
            self._has_warned_of_guard = True
            if self.world.rank == 0:
                log.warning(
                    "a guard outside of the loop over job.batches is entered without the question "
                    "whether it is completed: after each recovery the scripts of all ranks begin "
                    "anew and run it again. To run it once, write `guard = job.guard()`, then "
                    "`while not guard.completed: with guard: ...`"
                )
        place.enter_guard(is_unconditional=is_unconditional)

    def _recover_in_guard(self, error: BaseException) -> bool:
        """Recover from a failure in a guard; False if the error is the loop's own."""
        if not (isinstance(error, Exception) and self._is_from_generation_end(error)):
            return False
        self._recover(error)
        return True

    def _finish(self) -> None:
        """Wait until the last step is committed, and stored if `checkpoint` is given."""
        final = self._state.position
        if self._passes.has_more(final):
            log.warning(
                "rank %d leaves the loop over job.batches after step %d, before its pass is over. "
                "If not all ranks leave it after this step, they wait for each other: job.stop() "
                "ends a pass on all of them",
                self.world.rank,
                final.step,
            )
        monitor.end_step()
        with monitor.phase(monitor.Phase.CHECKPOINT):
            self._commit_and_store_final(final)
        self._report_progress()

    def _commit_and_store_final(self, final: Position) -> None:
        generation = self.world.generation
        if final.step > 0:
            error: Exception | None
            try:
                error = self._compare_replicas(precedes_snapshot=True)
            except RuntimeError as broken:
                if not self._is_from_generation_end(broken):
                    raise
                error = broken
            if error is not None:
                self._recover_after_loop(error)
            if not self._state.snapshots.commit_final_snapshot(
                self._passes.located(final),
                partial(self._session.wait_for_commit, generation=generation),
            ):
                self._recover_after_loop()
        self._session.report(Finishing(step=final.step))
        stores = self._checkpoint is not None and final.step > 0
        if stores and not self._session.wait_for_stored(final.step, generation):
            self._recover_after_loop()

    def _recover_after_loop(self, error: Exception | None = None) -> NoReturn:
        """Recover after the loop has ended: as a new process.

        A process that replaces a lost one calls all collectives of the script's end again, and
        those of guards after the loop: this one would wait beyond them, or call others.
        """
        # All ranks see the next generation at the same time; later, one after the other would.
        self._session.wait_for_assignment(self._leave(error))
        self._restart_script("its loop was over, and ranks that are new run its end again")

    def _restart_script(self, reason: str) -> NoReturn:
        """Exit, so that the agent runs the script from its beginning.

        Needed when the script's loop has already passed the position of the restored state.
        """
        self._session.restart_script(reason)
