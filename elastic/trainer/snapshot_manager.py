"""Takes snapshots of one worker's training state in one generation, and restores the state.

The state does not change between two optimizer steps, so the copy begins when a step ends and must
be complete just before an optimizer writes again (DataStates-LLM, arXiv 2406.10707). State that
other code than optimizers may write to at any time (buffers, averages of the weights) is copied
synchronously, and so is all state once a write during a copy has been seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist

from keepstep import monitor
from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    SnapshotUnavailable,
    StateChanged,
)
from keepstep.checkpoint.format.stored import housekeeping
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.ranks.agreement import (
    agreed_steps,
    load_newest_intact,
    union_of_all_ranks,
)
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS
from keepstep.checkpoint.ranks.shared_metadata import open_together
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic, fill_together
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource
from keepstep.elastic.data.position import Position
from keepstep.elastic.rendezvous.records import (
    LoadedCheckpoint,
    Member,
    ShardRebuild,
    SnapshotCommit,
)
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.state import State
from keepstep.elastic.trainer.training_state import BegunRestore, TrainingState
from keepstep.elastic.worker.messages import Assignment
from keepstep.elastic.worker.peer_failure import is_peer_failure

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class _Agreement:
    """Facts that hold on all ranks.

    The next snapshot is wanted; the last one is committed; it is not torn; the generation goes on;
    so does the pass over the data.
    """

    is_wanted: bool
    is_committed: bool
    is_complete: bool
    generation_continues: bool
    pass_continues: bool

    @property
    def is_possible(self) -> bool:
        """Whether a snapshot may begin: the last one is committed, or discarded by all ranks."""
        return self.is_committed or not self.is_complete

    @property
    def is_worth_retrying(self) -> bool:
        """Whether a later agreement may have another result.

        The commit is still expected, or by then a rank knows that its copy is torn. Also where no
        snapshot is wanted: the generation may end after this step, and a rank that does not know of
        another's torn copy would wait for a commit that never comes.
        """
        return not self.is_possible


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where the training goes on.

    Attributes:
        position: the position.
        source: where the state came from, comma-separated; "start" if it was initialized, and
            "start_from" with the format if another job's or tool's checkpoint was loaded. Beside
            "storage" stands how many bytes were read per byte of distinct tensors.
        loaded: what was found in storage, if it came from there alone.
        begins: whether the job has nothing of its own to resume from.
    """

    position: Position
    source: str
    loaded: LoadedCheckpoint | None = None
    begins: bool = False


class SnapshotManager:
    """The training state of one worker in one generation, and its snapshots, until `close`."""

    def __init__(
        self,
        state: State,
        device: torch.device,
        assignment: Assignment,
        checkpoint: str | None,
        is_committed: Callable[[int], bool],
        is_closing: Callable[[], bool],
        may_seal: Callable[[], bool],
        interval: SnapshotInterval,
        located: Callable[[Position], Position],
        *,
        data_share: tuple[int, int],
        start_from: StartFrom | None = None,
        copies_synchronously: bool = False,
        is_stage: bool = False,
    ) -> None:
        self._snapshot_interval = interval
        self._blocked_s = 0.0
        self._completed_step = 0
        self._assignment = assignment
        self._checkpoint = checkpoint
        self._start_from = start_from
        self._ranks = CONTROL_GROUPS.of()
        self.training = TrainingState(state, device, assignment.rank, data_share, is_stage=is_stage)
        self._client: SnapshotClient | None = None
        self._snapshotter: Snapshotter | None = None
        # Without a server, in a process that no agent has started, nothing is copied.
        if assignment.server:
            self._client = SnapshotClient(assignment.server, bytes.fromhex(assignment.secret))
            self._snapshotter = Snapshotter(
                self._client,
                assignment.generation,
                assignment.rank,
                device,
                may_seal,
            )
        self._last_snapshot_step = -1
        self._is_intact = True
        # Torn: the state changed during the copy of the last snapshot on this rank. If it is torn
        # on any rank, all ranks agree to discard it.
        self._is_torn = self._discard_uncommitted = False
        self.copies_synchronously = copies_synchronously or self.training.may_replay_writes
        """Whether training waits for each copy: the state was written to during one, or may be."""
        self._is_committed = is_committed
        self._is_closing = is_closing
        self._located = located
        self.is_ending = False
        """Whether all ranks have agreed that the generation ends after the step just completed."""
        self.is_stopping = False
        """Whether all ranks know that one of them wanted to stop when that step began."""
        self._wants_stop = False
        self._pending_agreement: tuple[torch.Tensor, dist.Work | None] | None = None
        self._in_step = self._is_agreement_final = False
        self._hooks = (
            *(
                optimizer.register_step_pre_hook(lambda *_: self._before_write())
                for optimizer in self.training.optimizers
            ),
            state.model.register_forward_hook(self._after_forward),
        )

    def resume(self, seed: int, newest_step: int | None = None) -> Resumed:
        """Restore the state from memory, else from storage, else begin with a new one.

        Args:
            seed: seed for random numbers of ranks that the source has no state of.
            newest_step: if the snapshot in memory is of a later step, a stored checkpoint of this
                step or an earlier one is taken, if there is one; the same on all ranks.
        """
        resumed = self._resume(seed, newest_step)
        self._completed_step = resumed.position.step
        return resumed

    def _resume(self, seed: int, newest_step: int | None) -> Resumed:
        resume = self._assignment.resume
        if resume is None:
            return self._resume_without_memory(seed)
        if newest_step is not None and resume.snapshot.step > newest_step:
            rolled_back = self._roll_back(newest_step, seed)
            if rolled_back is not None:
                return rolled_back
        if not resume.stored:
            return self._restore_from_memory(resume, seed)
        try:
            return self._ranks.run_on_all_ranks(lambda: self._restore_from_memory(resume, seed))
        except CheckpointDamaged as error:
            log.warning("%s: resuming from storage alone", error)
            return self._resume_without_memory(seed)

    def complete_step(self, position: Position) -> bool:
        """Complete a step at `position`; return whether the ranks agreed on a snapshot of it.

        All ranks must take the same snapshots; otherwise none would be complete. They take one if
        all want it and, by the time the optimizer runs, either all know that the last one is
        committed, or any knows that it is torn and never will be. They agree by a reduction of
        a few numbers that runs beside the backward pass; if the commit was not known then, by
        another one beside the optimizer, or here if none has written.

        By the same reduction they learn whether any of them wants to stop, and whether any knows
        that the generation closes. If it does, all of them end it after this step, and none is
        inside the next one: what a step has begun to change besides the parameters (random numbers,
        statistics, `extra`) is not sealed.
        """
        self._in_step = self.is_stopping = False
        self._completed_step = position.step
        self._snapshot_interval.note_step(time.monotonic())
        if self._pending_agreement is None:
            return False
        agreement = self._finish_agreement()
        if agreement.is_worth_retrying and not self._is_agreement_final:
            # No optimizer has written, as after an overflow. Others may have, and agreed again.
            self._wait()
            self._start_agreement()
            agreement = self._finish_agreement()
        self._pending_agreement = None
        self._is_intact = True
        self.is_ending = not agreement.generation_continues
        self.is_stopping = not agreement.pass_continues
        return agreement.is_wanted and agreement.is_possible

    def take_agreed(self, position: Position) -> None:
        """Begin the snapshot that `complete_step` has returned True for."""
        began_s = time.monotonic()
        self.snapshot(position)
        self._blocked_s = time.monotonic() - began_s

    def seal_before_closing(
        self, position: Position, wait_for_commit: Callable[[int], bool]
    ) -> None:
        """Seal a snapshot at `position` before an orderly end of the generation; between steps.

        Args:
            position: position of the state.
            wait_for_commit: waits for the commit of a step; False if it will not be committed.
        """
        while self._is_intact and self._last_snapshot_step != position.step and position.step > 0:
            self._wait()
            if self._is_torn and not self._discard_uncommitted:
                return
            if not self.snapshot(position) and not wait_for_commit(self._last_snapshot_step):
                return
        self._wait()

    def begin_step(self, *, stops: bool = False) -> None:
        """Begin a step: from here to `complete_step` all ranks run the same collectives.

        Args:
            stops: this rank wants the step to be the last of the pass over the data.
        """
        self._in_step, self._wants_stop = True, stops
        self._is_agreement_final = False

    def _after_forward(self, *_: object) -> None:
        # A graph that is compiled whole has no place for this: it begins before the optimizer then.
        if torch.compiler.is_compiling():
            return
        # Outside of steps ranks may do different things: one of them may run an evaluation.
        if self._in_step and self._pending_agreement is None:
            self._start_agreement()

    def _before_write(self) -> None:
        began_s = time.monotonic()
        self._wait()
        first_write, self._is_intact = self._is_intact, False
        if first_write and self._blocked_s:
            self._snapshot_interval.note_snapshot(self._blocked_s + time.monotonic() - began_s)
            self._blocked_s = 0.0
        if self._pending_agreement is None or (
            first_write and self._finish_agreement().is_worth_retrying
        ):
            # The copy is complete: whether it is torn is known.
            self._is_agreement_final = True
            self._start_agreement()

    def _start_agreement(self) -> None:
        """Start the reduction of what `_Agreement` holds."""
        is_wanted = self._snapshot_interval.is_wanted(
            self._completed_step + 1, self._last_snapshot_step
        )
        values = torch.tensor(
            [
                int(is_wanted),
                int(self._is_committed(self._last_snapshot_step)),
                int(not self._is_torn),
                int(not self._is_closing()),
                int(not self._wants_stop),
            ]
        )
        work = (
            dist.all_reduce(values, dist.ReduceOp.MIN, async_op=True)
            if dist.get_world_size() > 1
            else None
        )
        self._pending_agreement = (values, work)

    def _finish_agreement(self) -> _Agreement:
        """Wait for the result of the reduction, which is the same on every rank."""
        assert self._pending_agreement is not None
        values, work = self._pending_agreement
        if work is not None:
            work.wait()
        agreement = _Agreement(*map(bool, values.tolist()))
        self._discard_uncommitted = not agreement.is_complete
        return agreement

    def snapshot(self, position: Position) -> bool:
        """Begin to copy the current state; False if the last snapshot is not committed yet."""
        if not self._may_begin():
            return False
        with monitor.phase(monitor.Phase.CHECKPOINT):
            self._begin_copy(position)
        if self.copies_synchronously:
            self._wait()
        return True

    def _begin_copy(self, position: Position, agree: Callable[[bool], bool] | None = None) -> None:
        if self.copies_synchronously:
            # A step may replace the memory of its tensors, which also makes copies synchronous.
            self.training.invalidate_if_moved()
        if self._snapshotter is not None:
            live = self.training.capture(self._located(position))
            self._snapshotter.start(
                position.step,
                live.tensors,
                live.documents,
                discard_uncommitted=self._discard_uncommitted,
                agree=agree,
            )
        self._last_snapshot_step, self._is_torn, self._discard_uncommitted = (
            position.step,
            False,
            False,
        )

    def _may_begin(self) -> bool:
        """Whether this rank's last snapshot is committed, or discarded by all ranks."""
        return self._discard_uncommitted or self._is_committed(self._last_snapshot_step)

    def _wait(self) -> None:
        """Wait for the copy in progress."""
        if self._snapshotter is None:
            return
        try:
            self._snapshotter.wait()
        except StateChanged as changed:
            self._is_torn = True
            if not self.copies_synchronously:
                self.copies_synchronously = True
                log.warning(
                    "%s: from now on training waits while state is copied. To avoid this, write to "
                    "the state only inside `with job.step()`",
                    changed,
                )

    def commit_final_snapshot(
        self, position: Position, wait_for_commit: Callable[[int], bool]
    ) -> bool:
        """Commit the state at `position`, which must not change any more; called by all ranks.

        Returns False if the generation closes before the commit.
        """
        try:
            self.seal_before_closing(position, wait_for_commit)
            self._start_agreement()
            self._finish_agreement()
            if self._discard_uncommitted:
                self._retake(position)
        except SnapshotUnavailable:
            # Refused, because something broke and all are fenced.
            if self._is_closing():
                return False
            raise
        except RuntimeError as error:
            if is_peer_failure(error):
                return False
            raise
        return wait_for_commit(position.step)

    def _retake(self, position: Position) -> None:
        """Take the final snapshot again: the state was written to on a rank during the first copy.

        Raises:
            StateChanged: it was again, on any rank.
        """
        self.copies_synchronously = True
        with monitor.phase(monitor.Phase.CHECKPOINT):
            self._begin_copy(position, agree=self._are_all)
            if self._snapshotter is not None:
                self._snapshotter.wait()

    def close(self) -> None:
        """Wait for a copy in progress, then release all resources."""
        for hook in self._hooks:
            hook.remove()
        if self._snapshotter is not None:
            self._snapshotter.close()
        if self._client is not None:
            self._client.close()

    def _restore_from_memory(self, resume: SnapshotCommit, seed: int) -> Resumed:
        holders = [Holder(self._server(member), tuple(member.ranks)) for member in resume.holders]
        # A later entry takes precedence: the node that rebuilds a lost rank's shard holds it.
        holders += [
            Holder(self._server(rebuild), (rebuild.rank,), rebuilds=True)
            for rebuild in resume.shard_rebuilds
        ]

        def open_stored() -> StoredCheckpoint:
            storage = open_storage(resume.stored)
            return StoredCheckpoint.open(storage, resume.snapshot.step, resume.stored_generation)

        source = MemorySource(
            resume.snapshot,
            holders,
            bytes.fromhex(self._assignment.secret),
            rank=self._assignment.rank,
            open_fallback=open_stored if resume.stored else None,
        )
        with closing(source):
            position = self.training.restore_from(source, seed)
            return Resumed(position, source.describe())

    def _roll_back(self, newest_step: int, seed: int) -> Resumed | None:
        """Restore the newest intact checkpoint of a step or one before; None if there is none.

        Checkpoints of later steps are removed: the job computes these steps again, and neither it
        nor a later launch may take one of them for its newest state.
        """
        storage: Storage | None = None
        steps: Sequence[StoredStep] = ()
        resumed: Resumed | None = None
        try:
            if self._checkpoint is not None:
                storage = open_storage(self._checkpoint)
                steps = agreed_steps(storage, self._ranks)
            if storage is not None and any(stored.step <= newest_step for stored in steps):
                resumed = self._restore_stored(storage, steps, seed, newest_step)
        except CheckpointError as error:
            # All ranks raise one for the same reason, also where storage cannot be reached.
            log.warning("%s", error)
        if storage is not None and resumed is not None:
            undone = [stored for stored in steps if stored.step > resumed.position.step]
            self._ranks.run_on_all_ranks(
                lambda: _remove(storage, undone) if self._ranks.rank == 0 else None
            )
            return resumed
        if self._ranks.rank == 0:
            log.warning(
                "there is no checkpoint of step %d or before it to roll back to: the job goes on "
                "from its last snapshot",
                newest_step,
            )
        return None

    def _resume_without_memory(self, seed: int) -> Resumed:
        """Restore the newest stored checkpoint that no rank finds damaged, else begin."""
        if self._checkpoint is None:
            return self._begin(seed)
        storage, ranks = open_storage(self._checkpoint), self._ranks
        # Only rank 0 tries, and lists the steps: all ranks resume from one of them.
        ranks.run_on_all_ranks(lambda: storage.probe_writable() if ranks.rank == 0 else None)
        steps = agreed_steps(storage, ranks)
        return self._restore_stored(storage, steps, seed) if steps else self._begin(seed)

    def _restore_stored(
        self,
        storage: Storage,
        steps: Sequence[StoredStep],
        seed: int,
        newest_step: int | None = None,
    ) -> Resumed:
        """Restore the newest of these checkpoints that no rank finds damaged.

        Args:
            storage: has them.
            steps: all checkpoints there, newest first.
            seed: as for `resume`.
            newest_step: those of later steps are left out.

        Raises:
            CheckpointDamaged: all of them are damaged.
        """

        ranks = self._ranks

        def restore(stored: StoredStep) -> tuple[Position, RestoreTraffic]:
            opened = open_together(storage, ranks, stored.step, stored.generation)

            # All ranks take the checkpoint's names for the same.
            training = self.training
            names = union_of_all_ranks(training.parameter_names(), ranks)
            taken = union_of_all_ranks(ranks.run_on_all_ranks(training.taken_names), ranks)

            def begin() -> tuple[StoredCheckpoint, BegunRestore]:
                source = opened.named_for(names)
                return source, training.begin_restore(source, taken)

            source, begun = ranks.run_on_all_ranks(begin)
            traffic = fill_together(lambda: begun.fills, source, ranks)
            return self._ranks.run_on_all_ranks(
                lambda: self.training.finish_restore(begun, seed)
            ), traffic

        wanted = [s for s in steps if newest_step is None or s.step <= newest_step]
        loaded = load_newest_intact(storage.url, wanted, restore, ranks)
        position, traffic = loaded.result
        if self._ranks.rank == 0:
            log.info("%s: restored step %d: %s", storage.url, position.step, traffic)
        damaged = (f"step {stored.step} damaged" for stored in loaded.damaged)
        return Resumed(
            position,
            ", ".join([f"storage ({traffic.ratio:.2f} x)", *damaged]),
            LoadedCheckpoint(loaded.stored.step, max(stored.generation for stored in steps)),
        )

    def _begin(self, seed: int) -> Resumed:
        """Begin a job that has neither a snapshot nor a checkpoint of its own."""
        if self._start_from is None:
            return Resumed(self.training.start_fresh(seed), "start", begins=True)
        position, source = self.training.start_from(self._start_from, seed)
        return Resumed(position, source, begins=True)

    def _are_all(self, holds: bool) -> bool:
        """Return whether something holds on all ranks; a collective."""
        return all(self._ranks.gather(holds))

    def _server(self, holder: Member | ShardRebuild) -> str:
        """Return the address of a holder's server; that of this node is reached locally."""
        return self._assignment.server if holder.node == self._assignment.node else holder.server


def _remove(storage: Storage, undone: Sequence[StoredStep]) -> None:
    """Remove checkpoints of steps that are computed again, the newest first."""
    for stored in undone:
        try:
            housekeeping.remove(storage, stored, now=time.time())
        except CheckpointError as error:
            # The state is restored already, and is the right one to go on from.
            log.error(
                "%s: %s, which the job has rolled back from, is not removed, and a launch after "
                "the loss of all memory may resume from it; `keepstep ckpt rm` removes it: %s",
                storage.url,
                stored.directory,
                error,
            )
        else:
            log.info(
                "%s: removed %s, which the job has rolled back from", storage.url, stored.directory
            )
