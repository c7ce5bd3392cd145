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
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.bad_steps import BadSteps, StepJudge
from keepstep.elastic.trainer.events import Callbacks, EventReporter, GenerationEntered
from keepstep.elastic.trainer.generation_state import GenerationState
from keepstep.elastic.trainer.guard import Guard, GuardControl
from keepstep.elastic.trainer.mesh_rule import MeshRule
from keepstep.elastic.trainer.passes import Passes
from keepstep.elastic.trainer.process_groups import ProcessGroups, World
from keepstep.elastic.trainer.replicas import OnDivergence, ReplicaCheck
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.state import Build
from keepstep.elastic.trainer.step import Step
from keepstep.elastic.trainer.step_control import StepControl
from keepstep.elastic.worker.messages import (
    Assignment,
    Finishing,
)
from keepstep.elastic.worker.peer_failure import is_peer_failure
from keepstep.elastic.worker.session import Session

log = logging.getLogger("keepstep")

T = TypeVar("T")
_END_OF_DATA = object()
_NO_CALLBACKS = Callbacks()


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
        self._steps = StepControl(
            session=session,
            state=self._state,
            passes=self._passes,
            replicas=self._replicas,
            judge=self._judge,
            events=self._events,
            recover=self._recover,
        )
        self._guards = GuardControl(
            session=session,
            state=self._state,
            passes=self._passes,
            steps=self._steps,
            recover=self._recover,
            restart_script=self._restart_script,
        )
        self._pass_generation = 0

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
        if isinstance(error, NameError) and self._guards.left_out:
            error.add_note(
                f"This process has restarted the script, and left out {self._guards.left_out} "
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
            UsageError: the pass would have no step, the batch is larger than the dataset or smaller
                than the data-parallel size, what has no length is given without `steps` or can be
                read only once, the pass before is not over, or the job resumes within a pass that
                had another dataset length or global batch.
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
            self._steps.batch_generation = None

    def _batches_of(self, data: DataPass[Any]) -> Iterator[Any]:
        """Yield this rank's share of each global batch of a pass, from the position on."""
        self._steps.has_begun = False
        while self._state.position.batch < data.end:
            generation, yielded = self.world.generation, 0
            loader = data.from_position(
                self._state.position, self.world.data_rank, self.world.data_size
            )
            while True:
                if self._state.position.batch < data.end:
                    # For the monitor, a step begins with the wait for its data.
                    self._steps.mark()
                batch = next(loader, _END_OF_DATA)
                if batch is _END_OF_DATA:
                    break
                before = self._state.position
                if self._judge is not None and self._judge.is_skipped(before.batch):
                    self._state.position = replace(before, batch=before.batch + 1)
                    continue
                loss_scale = data.loss_scale(self.world.data_rank, self.world.data_size)
                self._steps.take_batch(before, loss_scale)
                yielded += 1
                yield batch
                if self.world.generation == generation and self._state.snapshots.is_ending:
                    # Not at the end of the step: the loop's code after it uses that step's world.
                    self._recover(None)
                if self.world.generation != generation:
                    break
                if yielded == 2 and self.steps == 0 and not self._steps.has_begun:
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
        return Step(self._steps)

    def guard(self) -> Guard:
        """Return a context for collectives outside of steps, such as an evaluation's; see `Guard`.

        All ranks must run the same collectives in it, as in a step.
        """
        is_over = self._passes.place.come_to_guard(self._state.position.batch)
        return Guard(self._guards, is_over=is_over)

    def stop(self) -> None:
        """End the pass over the data, on all ranks, after the next step that begins.

        One rank may ask for it alone, at any time; the ranks agree in the next step. That the pass
        is over is part of the state after that step. Where a recovery returns to a state from
        before the call, the loop comes to the reason for it again. What is asked for in the last
        step of a pass has no effect.
        """
        self._passes.request_stop(self._state.position)

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
            self._steps.enter_generation()
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
        for rejected in self._judge.take_unreported() if self._judge is not None else ():
            if assignment.rank == 0:
                log.warning("%s", rejected)
            self._events.reject(rejected)

    def _recover(self, error: BaseException | None) -> None:
        """Leave the current generation and enter the next one, or restart the script in it.

        Args:
            error: what has ended the generation; None if it ends in good order.
        """
        self._enter(self._leave(error))
        reason = self._passes.place.reason_to_restart(self._state.position.batch)
        if reason:
            self._restart_script(reason)

    def _leave(self, error: BaseException | None) -> int:
        """Leave the current generation, as in `_recover`, and return its number."""
        generation = self.world.generation
        self._events.leave(self.steps, time.monotonic())
        self._state.end(generation, error)
        return generation

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
        self._steps.report_progress()

    def _commit_and_store_final(self, final: Position) -> None:
        generation = self.world.generation
        if final.step > 0:
            error: Exception | None
            try:
                error = self._steps.compare_replicas(precedes_snapshot=True)
            except RuntimeError as broken:
                if not self._steps.is_from_generation_end(broken):
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
