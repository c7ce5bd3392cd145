"""The training loop's side of keepstep: `join`, and the `Job` it returns.

One path leads into every generation, the first as well as one after a failure: take the assignment, enter the process group, call
the user's `build`, fill the state from where the generation document says, go on at that step. What a worker holds when a generation
ends is thrown away; only sealed snapshots count.

A peer's failure shows as an exception of some collective, inside `Job.step`. The step's exit then gives up the generation, waits for the
next and enters it; the batch iterator, which belongs to the job too, hands out the batch of the restored position next.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep import monitor
from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.elastic.errors import UsageError
from keepstep.elastic.rendezvous.intervals import AUTO
from keepstep.elastic.trainer.data import Batches, Dataset, Position
from keepstep.elastic.trainer.process_groups import ProcessGroups, World, is_peer_failure
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.snapshot_manager import SnapshotManager
from keepstep.elastic.trainer.state import Build
from keepstep.elastic.worker import telemetry
from keepstep.elastic.worker.session import Assignment, Session, current, wall_clock_s

T = TypeVar("T")
_NO_MORE = object()


def join(
    build: Build,
    *,
    checkpoint: str | None = None,
    checkpoint_every: int | Literal["auto"] | None = None,
    snapshot_every: int | Literal["auto"] = 1,
    mesh: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Job:
    """Join the job that this worker was started for; use the result as a context manager.

    Args:
        build: makes the sharded model and names its optimizer for a given world; called again for every generation.
        checkpoint: URL under which checkpoints are stored and found (`/path`, `file://`, `s3://bucket/prefix`).
        checkpoint_every: store a checkpoint about every so many steps; "auto": as often as loses least (`keepstep.elastic.rendezvous.intervals`);
            None: only at the end, and when a preempted job would lose its memory.
        snapshot_every: keep a snapshot in memory every so many steps; "auto": as often as loses least.
        mesh: names and sizes of the device mesh's dimensions, one of which may be -1; default `{"dp": -1}`.
        seed: of the random number generators and of the data order.

    Raises:
        UsageError: the process was not started by `keepstep run`, or an argument makes no sense.
    """
    for name, every in (("snapshot_every", snapshot_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and every != "auto" and (not isinstance(every, int) or every < 1):
            raise UsageError(f'{name}={every!r}: give the number of steps, at least 1, or "auto"')
    if checkpoint_every is not None and checkpoint is None:
        raise UsageError("checkpoint_every needs checkpoint=URL to say where")
    session = current()
    stored_every = AUTO if checkpoint_every == "auto" else checkpoint_every
    session.report("joined", checkpoint_url=checkpoint, checkpoint_every=stored_every)
    kept_every = AUTO if snapshot_every == "auto" else snapshot_every
    return Job(session, build, dict(mesh or {"dp": -1}), checkpoint, kept_every, seed)


class Job:
    """A training job as one worker sees it. Made by `join`."""

    def __init__(
        self,
        session: Session,
        build: Build,
        mesh: Mapping[str, int],
        checkpoint: str | None,
        snapshot_every: int,
        seed: int,
    ) -> None:
        self._session = session
        self._build = build
        self._mesh = mesh
        self._checkpoint = checkpoint
        self._snapshot_every = snapshot_every
        self._seed = seed
        self._position = Position()
        self._passes: list[int] = []
        self._groups = ProcessGroups()
        self._world: World | None = None
        self._snapshot_manager: SnapshotManager | None = None
        self._snapshot_interval = SnapshotInterval(snapshot_every, 0.0)
        self._copies_synchronously = False
        self._stepped = False
        self._first_step = 0
        self._marked = 0

    def __enter__(self) -> Self:
        self._session.on_abort(self._groups.abort)
        self._enter(newer_than=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._session.on_abort(None)
            self._leave()

    @property
    def world(self) -> World:
        """The present generation's ranks, mesh and device."""
        assert self._world is not None, "the job is entered with `with`"
        return self._world

    @property
    def model(self) -> nn.Module:
        """The model of the present generation. It is a new object after every change of membership."""
        return self._entered_snapshots.training.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the present generation, the first if there are several."""
        return self._entered_snapshots.training.optimizers[0]

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers of the present generation."""
        return self._entered_snapshots.training.optimizers

    @property
    def scheduler(self) -> LRScheduler | None:
        """The learning-rate scheduler of `optimizer`, if `build` named one."""
        return (
            self._entered_snapshots.training.schedulers[0]
            if self._entered_snapshots.training.schedulers
            else None
        )

    @property
    def schedulers(self) -> tuple[LRScheduler, ...]:
        """The learning-rate schedulers, one for each optimizer, if `build` named one."""
        return self._entered_snapshots.training.schedulers

    @property
    def steps(self) -> int:
        """Number of optimizer steps completed since the beginning of training."""
        return self._position.step

    @property
    def _entered_snapshots(self) -> SnapshotManager:
        assert self._snapshot_manager is not None, "the job is entered with `with`"
        return self._snapshot_manager

    def batches(
        self,
        dataset: Dataset[T],
        global_batch: int,
        *,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = True,
        collate: Callable[[list[T]], Any] | None = None,
        workers: int = 0,
    ) -> Iterator[Any]:
        """Yield this rank's share of each global batch: the same samples in the same order, whatever the world size.

        After a recovery the iterator goes on at the restored position. Each call is one pass; a script that calls it once per epoch
        finds passes that were completed before a restart empty.

        Args:
            dataset: anything with `len` and indexing by int.
            global_batch: samples per step over all ranks. If it does not divide by the data-parallel size, shares differ by one:
                multiply the loss by `step.loss_scale` to keep the average exact.
            epochs: how often to go through the dataset; an epoch's last, incomplete batch is dropped.
            steps: end the pass after so many steps instead.
            shuffle: permute each epoch by the job's seed.
            collate: makes a batch of a list of samples; default as torch's DataLoader.
            workers: processes that load ahead, as torch's DataLoader has them.

        Raises:
            UsageError: the batch is larger than the dataset or smaller than the data-parallel size.
        """
        passes = Batches(dataset, global_batch, self._seed, shuffle, collate, workers)
        length = steps if steps is not None else epochs * passes.per_epoch
        begin = sum(self._passes)
        self._passes.append(length)
        while self._position.batch < begin + length:
            if self._position.batch < begin:
                self._restart_script("the state goes back to an earlier pass over the data")
            generation = self.world.generation
            loader = passes.from_position(
                self._position.batch - begin, length, self.world.data_rank, self.world.data_size
            )
            while True:
                if self._position.batch < begin + length:
                    # A step begins with the wait for its data.
                    self._mark_step()
                batch = next(loader, _NO_MORE)
                if batch is _NO_MORE:
                    break
                before = self._position
                self._loss_scale = passes.loss_scale(self.world.data_rank, self.world.data_size)
                yield batch
                if self.world.generation == generation and self._session.is_closing(generation):
                    # Here and not when the step ends, so that what the loop does after a step still sees that step's world.
                    self._recover(None)
                if self.world.generation != generation:
                    break
                if self._position == before:
                    # The loop skipped this batch on its own account.
                    self._position = replace(before, batch=before.batch + 1)

    _loss_scale = 1.0

    def step(self) -> Step:
        """Return the context of one optimizer step; see `Step`."""
        return Step(self)

    def _mark_step(self) -> None:
        """Have the monitor, if there is one, know that the next step is under way. It counts from the generation's first."""
        number = self._position.step - self._first_step + 1
        if self._marked != number:
            self._marked = number
            monitor.begin_step(number)

    def begin_step(self) -> None:
        """Forget old gradients. Called by `Step`."""
        self._mark_step()
        self._entered_snapshots.begin_step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def end_step(self, error: BaseException | None) -> bool:
        """Complete the step or recover from its failure. Called by `Step`; True when the error is dealt with."""
        try:
            return self._end_step(error)
        finally:
            # What the loop does now, such as evaluating, may take its time.
            self._marked = 0
            monitor.end_step()

    def _end_step(self, error: BaseException | None) -> bool:
        if error is None:
            try:
                self._complete_step()
            except RuntimeError as late:
                # The agreement on the next snapshot is a collective too.
                if not self._is_ending(late):
                    raise
                self._recover(late)
            return True
        if isinstance(error, Exception) and self._is_ending(error):
            self._recover(error)
            return True
        return False

    def _is_ending(self, error: Exception) -> bool:
        """Whether an error comes from the generation's end rather than from the training code."""
        return is_peer_failure(error) or self._session.is_closing(self.world.generation)

    @property
    def loss_scale(self) -> float:
        """This rank's weight in the batch: 1.0 unless the shares of the batch are uneven."""
        return self._loss_scale

    def _complete_step(self) -> None:
        self._position = Position(self._position.step + 1, self._position.batch + 1)
        generation = self.world.generation
        self._session.progress(generation, self.steps)
        if not self._stepped:
            self._stepped = True
            self._session.report("stepped", generation=generation, at_s=wall_clock_s())
        self._entered_snapshots.complete_step(self._position)
        news = self._snapshot_interval.notable_change()
        if news is not None:
            every, cost_s = news
            self._session.report(
                "snapshot_interval", generation=generation, every=every, cost_s=cost_s
            )

    def _enter(self, newer_than: int) -> None:
        """Enter the next generation, and the one after it if that breaks before it runs."""
        while True:
            assignment = self._session.wait_for_assignment(newer_than)
            newer_than = assignment.generation
            try:
                self._enter_generation(assignment)
            except (RuntimeError, SnapshotUnavailable) as error:
                # Who holds the state may be lost while it is being restored.
                is_late_loss = isinstance(error, SnapshotUnavailable) or is_peer_failure(error)
                if not (is_late_loss or self._session.is_closing(newer_than)):
                    raise
                self._end_generation(newer_than, error)
            else:
                return

    def _enter_generation(self, assignment: Assignment) -> None:
        os.environ.update(assignment.environment())
        self._stepped = False
        self._marked = 0
        telemetry.reopen(assignment)
        self._world = self._groups.enter(assignment, self._mesh)
        self._session.report("ready", generation=assignment.generation, at_s=wall_clock_s())
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        self._snapshot_interval = SnapshotInterval(self._snapshot_every, assignment.failures_per_s)
        self._snapshot_manager = SnapshotManager(
            self._build(self._world),
            self._world.device,
            assignment,
            self._checkpoint,
            self._session.is_committed,
            self._snapshot_interval,
            copies_synchronously=self._copies_synchronously,
        )
        self._position, source = self._snapshot_manager.resume(self._seed)
        self._first_step = self.steps
        self._session.progress(assignment.generation, self.steps)
        self._session.report(
            "restored",
            generation=assignment.generation,
            at_s=wall_clock_s(),
            source=source,
            step=self.steps,
        )
        if self.steps > 0:
            # New groups protect the state at once; until then a further loss might find too little of the old ones left.
            self._snapshot_manager.snapshot(self._position)

    def _recover(self, error: BaseException | None) -> None:
        """Leave the generation that ends and enter the next."""
        generation = self.world.generation
        self._end_generation(generation, error)
        self._enter(newer_than=generation)

    def _end_generation(self, generation: int, error: BaseException | None) -> None:
        """Seal what can be sealed, drop the rest, and tell the agent that this worker writes no more in this generation."""
        if error is not None and not self._session.is_closing(generation):
            self._session.report("broken", generation=generation, error=str(error).splitlines()[0])
        elif self._snapshot_manager is not None and not self._session.is_aborting(generation):
            self._snapshot_manager.seal_before_closing(
                self._position,
                lambda s: self._session.wait_for_commit(s, generation, also_closing=True),
            )
        # Peers blocked in a collective with this rank learn from the closed connections that it left.
        self._groups.leave()
        self._leave()
        self._session.report("drained", generation=generation)

    def _leave(self) -> None:
        if self._snapshot_manager is not None:
            self._copies_synchronously = self._snapshot_manager.copies_synchronously
            self._snapshot_manager.close()
        self._snapshot_manager = None
        self._groups.leave()
        gc.collect()

    def _finish(self) -> None:
        """Have the last step committed, and stored if there is a place for it, before the worker exits."""
        final = self._position
        monitor.end_step()
        with monitor.phase(monitor.Phase.CHECKPOINT):
            self._commit_and_store_final(final)

    def _commit_and_store_final(self, final: Position) -> None:
        generation = self.world.generation
        if final.step > 0:
            while not self._entered_snapshots.commit_final_snapshot(
                final, partial(self._session.wait_for_commit, generation=generation)
            ):
                generation = self._recover_to(final)
        self._session.report("finishing", step=final.step)
        while self._checkpoint is not None and final.step > 0:
            if self._session.wait_for_stored(final.step, generation):
                break
            generation = self._recover_to(final)
            self._session.report("finishing", step=final.step)

    def _recover_to(self, final: Position) -> int:
        """Recover although the loop is over: possible only if nothing has to be computed again."""
        self._recover(None)
        if self._position != final:
            self._restart_script("the last steps have to be computed again")
        return self.world.generation

    def _restart_script(self, reason: str) -> None:
        """Run the script from its beginning, for its loop is past the point that the state has gone back to."""
        self._session.report("restart", reason=reason)
        self._leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Step:
    """One optimizer step: `with job.step() as step: loss.backward(); job.optimizer.step()`.

    Gradients are cleared at the beginning. If a peer fails inside, the exception ends here: the job recovers, `completed` stays False, and
    the batch iterator comes with the batch of the restored position. Other exceptions pass.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.completed = False

    @property
    def loss_scale(self) -> float:
        """Factor for this rank's mean loss that keeps the average over ranks exact when their shares are uneven."""
        return self._job.loss_scale

    def __enter__(self) -> Self:
        self._job.begin_step()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        before = self._job.world.generation
        handled = self._job.end_step(error)
        self.completed = error is None and self._job.world.generation == before
        return handled and error is not None
