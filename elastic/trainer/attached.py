"""Protects the live objects of a training loop that is not keepstep's own: `attach`'s result.

It takes the same snapshots as `Job`, by the same agreement, for one generation alone. When that
ends, so does the process: its successor runs the script from its first line and restores.
"""

from __future__ import annotations

import logging
import operator
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from keepstep import monitor
from keepstep.checkpoint.errors import SnapshotUnavailable
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.elastic.data.data_pass import DataPass
from keepstep.elastic.data.datasets import Dataset, Source, Stream
from keepstep.elastic.data.order import DataOrder
from keepstep.elastic.data.position import IndexedPass, Position
from keepstep.elastic.data.rank_batches import RankBatches
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.generation_end import is_from_generation_end, report_broken
from keepstep.elastic.trainer.restorer import Restorer, report_restored
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.snapshot_manager import SnapshotManager
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.training_state import TrainingState
from keepstep.elastic.worker.messages import (
    Assignment,
    Finishing,
    SnapshotIntervalChosen,
    Stepped,
)
from keepstep.elastic.worker.session import Session, wall_clock_s

T = TypeVar("T")

log = logging.getLogger("keepstep")

_LONG_WAIT_S = 30.0


class Attached:
    """The protected objects of one process, from `attach` until `finish`, or its generation's end.

    Args:
        session: with the agent.
        assignment: this process's place in its only generation.
        training: the objects.
        ranks: all ranks, on connections of their own.
        device: where the model is.
        checkpoint: the URL that the job stores to, if any.
        start_from: what a new job begins from, if anything.
        snapshot_every: steps between snapshots, or automatic.
        seed: of the order of data.
        share: data-parallel rank, and number of data-parallel ranks.
        awaits_abort_order: an aborted collective may return garbage.
    """

    def __init__(
        self,
        *,
        session: Session,
        assignment: Assignment,
        training: TrainingState,
        ranks: ControlGroup,
        device: torch.device,
        checkpoint: str | None,
        start_from: StartFrom | None,
        snapshot_every: int,
        seed: int,
        share: tuple[int, int],
        awaits_abort_order: bool,
    ) -> None:
        self._session = session
        self._assignment = assignment
        self._training = training
        self._ranks = ranks
        self._device = device
        self._checkpoint = checkpoint
        self._start_from = start_from
        self._seed = seed
        self._share = share
        self._awaits_abort_order = awaits_abort_order
        self._position = Position()
        self._interval = SnapshotInterval(snapshot_every, assignment.failures_per_s)
        self._snapshots: SnapshotManager | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._is_finished = False
        self._has_stepped = False
        self._hands_over = False
        self._generators: tuple[Any, Mapping[str, torch.Tensor]] | None = None
        self._passes, self._passes_end = 0, 0
        self._data: DataPass[Any] | None = None
        self._sampled: IndexedPass | None = None
        self.source = ""
        """Where the state came from; "start" if there was nothing to restore."""
        if session.is_managed:
            session.on_abort(self._end_process, awaits_order=awaits_abort_order)
            session.at_script_end(self.finish)
            session.at_script_error(self.end_if_lost)

    @property
    def steps(self) -> int:
        """Number of optimizer steps completed since training began."""
        return self._position.step

    @property
    def is_managed(self) -> bool:
        """Whether an agent supervises this process, so that the script answers no signals."""
        return self._session.is_managed

    def restore(self, step: int | Callable[[], int] = 0) -> int:
        """Fill the objects with the job's newest state, and return its number of steps.

        From memory, else from storage, else from `start_from`; else they stay as they are, and the
        result is `step`. Generators of random numbers are restored, too. All ranks call it once,
        before the loop.

        Args:
            step: steps that the objects have behind them as they are, such as those of a checkpoint
                that the script has loaded itself; or a function that loads one, and returns them.
                It is called only where there is nothing to restore.

        Raises:
            UsageError: it was called before, or `step` is no number of steps.
            CheckpointError: the state does not fit these objects, or no checkpoint can be read.
        """
        if self._snapshots is not None:
            raise UsageError("restore() was called before: call it once, before the loop")
        if not callable(step):
            step = _count("restore(step", step)
        resumed = Restorer(
            training=self._training,
            assignment=self._assignment,
            checkpoint=self._checkpoint,
            start_from=self._start_from,
            seed=self._seed,
            ranks=self._ranks,
        ).resume()
        if resumed.begins and not resumed.position.step:
            begun = _count("restore(step", step()) if callable(step) else step
            resumed = replace(resumed, position=Position(begun))
        self._position, self.source = resumed.position, resumed.source
        if not resumed.begins:
            self._generators = random.getstate(), self._training.generators()
        report_restored(self._session, self._assignment, resumed)
        # Before the manager's hooks, which refuse an optimizer's step where the process is to end.
        self._hooks = (
            self._training.model.register_forward_pre_hook(self._before_forward),
            *(
                optimizer.register_step_pre_hook(lambda *_: self.end_if_over())
                for optimizer in self._training.optimizers
            ),
        )
        self._snapshots = SnapshotManager(
            training=self._training,
            device=self._device,
            assignment=self._assignment,
            session=self._session,
            interval=self._interval,
            ranks=self._ranks,
            step=self.steps,
        )
        if self.steps > 0:
            # Until then it depends on what is left of the old groups.
            self._snapshots.snapshot(self._position)
        self._begin_step()
        return self.steps

    def restore_generators(self) -> None:
        """Set the generators back to what `restore` has made them, before the first step.

        For loops that draw numbers to find their place in the data. Further calls do nothing.
        """
        if self._generators is not None:
            (python, tensors), self._generators = self._generators, None
            random.setstate(python)
            self._training.set_generators(tensors)

    def step_done(self, batches: int = 1) -> None:
        """Note that a step is completed: optimizers and schedulers have written all that it writes.

        All ranks call it after each step. The copy of the state then runs during the next forward
        and backward pass; the optimizer's next step waits for its end.

        If the job goes on with other ranks, the process ends when the model begins the next step.

        Args:
            batches: global batches that the step has consumed, of `batches` or `batch_sampler`.

        Raises:
            UsageError: `restore` was not called, or `finish` was; or `batches` is no number of
                batches.
        """
        snapshots = self._opened()
        batches = _count("step_done(batches", batches)
        self._generators = None
        position = self._position
        self._position = replace(position, step=position.step + 1, batch=position.batch + batches)
        self._session.progress(self._assignment.generation, self.steps)
        if not self._has_stepped:
            self._has_stepped = True
            self._session.report(
                Stepped(generation=self._assignment.generation, at_s=wall_clock_s())
            )
        monitor.end_step()
        takes_snapshot = snapshots.complete_step(self._position)
        if takes_snapshot:
            snapshots.take_agreed(self._located())
        self._hands_over = snapshots.is_ending
        chosen = self._interval.notable_change()
        if chosen is not None:
            every, cost_s = chosen
            self._session.report(
                SnapshotIntervalChosen(
                    generation=self._assignment.generation, every=every, cost_s=cost_s
                )
            )
        if not self._hands_over:
            self._begin_step()

    def finish(self) -> None:
        """Wait until the last step is safe, and stored if `checkpoint` is given.

        All ranks call it after the loop. In a job of `keepstep run` they may leave it to the end
        of the script, where keepstep calls it; under torchrun nothing does. Afterwards the objects
        are not protected any more.
        """
        if self._is_finished:
            return
        snapshots = self._opened()
        self.end_if_over()
        generation, final = self._assignment.generation, self._position
        monitor.end_step()
        with monitor.phase(monitor.Phase.CHECKPOINT):
            wait_for_commit = partial(self._session.wait_for_commit, generation=generation)
            with self._long_wait_named():
                is_safe = final.step == 0 or snapshots.commit_final_snapshot(
                    self._located(), wait_for_commit
                )
            if not is_safe:
                self._end_process()
            self._session.report(Finishing(step=final.step))
            stores = self._checkpoint is not None and final.step > 0
            if stores and not self._session.wait_for_stored(final.step, generation):
                self._end_process()
        self._is_finished = True
        for hook in self._hooks:
            hook.remove()
        snapshots.close()

    @contextmanager
    def _long_wait_named(self) -> Iterator[None]:
        """Log a line if the block takes long: other ranks may never come."""
        waiting = threading.Timer(
            _LONG_WAIT_S,
            log.warning,
            (
                "rank %d has come to its end after step %d, and waits until all ranks have; one "
                "that makes more steps than another, or is held up, keeps the job from its end",
                self._assignment.rank,
                self.steps,
            ),
        )
        waiting.daemon = True
        waiting.start()
        try:
            yield
        finally:
            waiting.cancel()

    def end_if_over(self) -> None:
        """End the process if the job goes on with other ranks.

        The model's and the optimizers' next step calls it. A framework that changes its own state
        before them calls it after `step_done`, once it has done all that follows a step.
        """
        if self._hands_over:
            self._hand_over()

    def end_if_lost(self, error: BaseException) -> None:
        """End the process if the end of its generation has caused an error of the script.

        For frameworks that handle errors; keepstep calls it for those that end the script.
        """
        if is_from_generation_end(self._session, self._assignment.generation, error):
            self._end_after(error)

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
        """Yield this rank's share of each global batch, from the restored position on.

        As `Job.batches`: the samples and their order are the same for any number of ranks. Call
        `step_done` once for each batch. In a script that calls it once per epoch, passes that were
        completed before yield nothing.

        Raises:
            UsageError: as `Job.batches` raises.
        """
        data: DataPass[Any] = DataPass(
            self._passes,
            self._passes_end,
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
        self._begin_pass(data.begin, data.end)
        data.check_continues(self._position)
        self._data, self._sampled = data, None
        if self._position.batch >= data.end:
            return
        for batch in data.from_position(self._position, *self._share):
            before = self._position
            yield batch
            if self._position.batch == before.batch:
                # The loop has skipped this batch.
                self._position = replace(self._position, batch=before.batch + 1)

    def batch_sampler(
        self, samples: int, global_batch: int, *, epochs: int = 1, shuffle: bool = True
    ) -> RankBatches:
        """Return a batch sampler for torch's DataLoader: this rank's share of each global batch.

        The order is that of `batches`, the same for any number of ranks. Each iteration goes on
        from the position, to the end of the epoch that it is in; after the last epoch it yields
        nothing. So a loop over epochs, and over the loader in it, resumes where the state is.

        Args:
            samples: the dataset's length.
            global_batch: samples per step over all ranks.
            epochs: number of passes through the dataset.
            shuffle: permute each epoch by `seed`.

        Raises:
            UsageError: the batch is larger than the dataset, or smaller than the number of
                data-parallel ranks; there is no epoch; or the job resumes within a pass that had
                another dataset length or global batch.
        """
        order = DataOrder(
            samples, global_batch, seed=self._seed, shuffle=shuffle, pass_number=self._passes
        )
        order.loss_scale(*self._share)
        if epochs < 1:
            raise UsageError(f"epochs={epochs}: give at least 1")
        begin = self._passes_end
        sampled = IndexedPass(
            begin=begin,
            end=begin + epochs * order.steps_per_epoch,
            global_batch=global_batch,
            samples=samples,
        )
        self._begin_pass(begin, sampled.end)
        if self._position.indexed_pass is not None:
            sampled.check_continues(self._position.indexed_pass, self._position.batch)
        self._data, self._sampled = None, sampled
        return RankBatches(
            order,
            lambda: self._position.batch - begin,
            lambda: self._share,
            epochs=epochs,
            on_resume=self.restore_generators,
        )

    def _begin_pass(self, begin: int, end: int) -> None:
        if self._position.batch < begin:
            raise UsageError(
                f"{begin - self._position.batch} global batches of the pass before are left: call "
                "step_done() once for each batch, and read one pass at a time"
            )
        self._passes, self._passes_end = self._passes + 1, end

    def _opened(self) -> SnapshotManager:
        if self._snapshots is None:
            raise UsageError("call restore() after keepstep.attach, before the loop")
        if self._is_finished:
            raise UsageError("finish() was called: no step follows it")
        return self._snapshots

    def _begin_step(self) -> None:
        assert self._snapshots is not None, "only after `restore`"
        self._snapshots.begin_step()
        monitor.begin_step(self.steps + 1)

    def _located(self) -> Position:
        """Return the position with what a job that resumes there must know of its data."""
        if self._sampled is not None and self._sampled.begin <= self._position.batch:
            return replace(self._position, indexed_pass=self._sampled)
        return self._data.located(self._position) if self._data else self._position

    def _before_forward(self, model: torch.nn.Module, _: Any) -> None:
        # A graph that is compiled whole has no place for this; the optimizers have.
        if model.training and not torch.compiler.is_compiling():
            self.end_if_over()

    def _hand_over(self) -> NoReturn:
        """Seal the state for the processes that go on with it, and end this one."""
        generation = self._assignment.generation
        assert self._snapshots is not None, "only after `restore`"
        try:
            self._snapshots.seal_before_closing(
                self._located(),
                lambda step: self._session.wait_for_commit(step, generation, also_closing=True),
            )
        except (RuntimeError, SnapshotUnavailable) as broken:
            self._end_after(broken)
        self._end_process()

    def _end_after(self, error: BaseException) -> NoReturn:
        """Report that something broke, and end the process once it may."""
        generation = self._assignment.generation
        report_broken(self._session, generation, error, awaits_order=self._awaits_abort_order)
        if self._awaits_abort_order:
            self._session.wait_for_abort_order(generation)
        self._end_process()

    def _end_process(self) -> NoReturn:
        self._session.end_for_successor(self._assignment.generation)


def _count(argument: str, value: Any) -> int:
    """Return an argument that counts something, as Python's integer."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"{argument}={value!r}): give a whole number, at least 0")
    return count
