"""Restores the training state where a generation begins: from memory, else from storage.

A job that has nothing of its own begins from another one's checkpoint, or initialized.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointError
from keepstep.checkpoint.format.stored import housekeeping
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.reader import StoredCheckpoint
from keepstep.checkpoint.format.stored.storage import Storage, open_storage
from keepstep.checkpoint.ranks.agreement import (
    agreed_steps,
    load_newest_intact,
    union_of_all_ranks,
)
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS, ControlGroup
from keepstep.checkpoint.ranks.shared_metadata import open_together
from keepstep.checkpoint.ranks.shared_restore import RestoreTraffic, fill_together
from keepstep.checkpoint.snapshot.memory.memory_source import Holder, MemorySource
from keepstep.elastic.data.position import Position
from keepstep.elastic.rendezvous.records import (
    LoadedCheckpoint,
    Member,
    ShardRebuild,
    SnapshotCommit,
)
from keepstep.elastic.trainer.start_from import StartFrom
from keepstep.elastic.trainer.training_state import BegunRestore, TrainingState
from keepstep.elastic.worker.messages import Assignment, Restored
from keepstep.elastic.worker.session import Session, wall_clock_s

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where the training goes on.

    Attributes:
        position: the position.
        source: where the state came from, comma-separated; "start" if it was initialized, and
            "start_from" with the format if another job's or tool's checkpoint was loaded. "storage"
            is followed by the number of bytes read per byte of distinct tensors.
        loaded: what was found in storage, if it came from there alone.
        begins: whether the job has nothing of its own to resume from.
    """

    position: Position
    source: str
    loaded: LoadedCheckpoint | None = None
    begins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Restores the training state of one worker in one generation.

    Attributes:
        training: the state.
        assignment: the generation, and what it resumes from.
        checkpoint: the URL that the job stores to, if any.
        start_from: what a new job begins from, if anything.
        seed: for random numbers of ranks that the source has no state of.
        ranks: all ranks of the generation.
    """

    training: TrainingState
    assignment: Assignment
    checkpoint: str | None
    start_from: StartFrom | None
    seed: int
    ranks: ControlGroup = field(default_factory=CONTROL_GROUPS.of)

    def resume(self, newest_step: int | None = None) -> Resumed:
        """Restore the state from memory, else from storage, else begin with a new one.

        Args:
            newest_step: if the snapshot in memory is of a later step, a stored checkpoint of this
                step or an earlier one is taken, if there is one; the same on all ranks.
        """
        resume = self.assignment.resume
        if resume is None:
            return self._resume_without_memory()
        if newest_step is not None and resume.snapshot.step > newest_step:
            rolled_back = self._roll_back(newest_step)
            if rolled_back is not None:
                return rolled_back
        if not resume.stored:
            return self._restore_from_memory(resume)
        try:
            return self.ranks.run_on_all_ranks(lambda: self._restore_from_memory(resume))
        except CheckpointDamaged as error:
            log.warning("%s: resuming from storage alone", error)
            return self._resume_without_memory()

    def _restore_from_memory(self, resume: SnapshotCommit) -> Resumed:
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
            bytes.fromhex(self.assignment.secret),
            rank=self.assignment.rank,
            open_fallback=open_stored if resume.stored else None,
        )
        with closing(source):
            position = self.training.restore_from(source, self.seed)
            return Resumed(position, source.describe())

    def _roll_back(self, newest_step: int) -> Resumed | None:
        """Restore the newest intact checkpoint of a step or one before; None if there is none.

        Checkpoints of later steps are removed: the job computes these steps again, and neither it
        nor a later launch may take one of them for its newest state.
        """
        storage: Storage | None = None
        steps: Sequence[StoredStep] = ()
        resumed: Resumed | None = None
        try:
            if self.checkpoint is not None:
                storage = open_storage(self.checkpoint)
                steps = agreed_steps(storage, self.ranks)
            if storage is not None and any(stored.step <= newest_step for stored in steps):
                resumed = self._restore_stored(storage, steps, newest_step)
        except CheckpointError as error:
            # All ranks raise one for the same reason, also where storage cannot be reached.
            log.warning("%s", error)
        if storage is not None and resumed is not None:
            undone = [stored for stored in steps if stored.step > resumed.position.step]
            self.ranks.run_on_all_ranks(
                lambda: _remove(storage, undone) if self.ranks.rank == 0 else None
            )
            return resumed
        if self.ranks.rank == 0:
            log.warning(
                "there is no checkpoint of step %d or before it to roll back to: the job goes on "
                "from its last snapshot",
                newest_step,
            )
        return None

    def _resume_without_memory(self) -> Resumed:
        """Restore the newest stored checkpoint that no rank finds damaged, else begin."""
        if self.checkpoint is None:
            return self._begin()
        storage, ranks = open_storage(self.checkpoint), self.ranks
        # Only rank 0 tries, and lists the steps: all ranks resume from one of them.
        ranks.run_on_all_ranks(lambda: storage.probe_writable() if ranks.rank == 0 else None)
        steps = agreed_steps(storage, ranks)
        return self._restore_stored(storage, steps) if steps else self._begin()

    def _restore_stored(
        self,
        storage: Storage,
        steps: Sequence[StoredStep],
        newest_step: int | None = None,
    ) -> Resumed:
        """Restore the newest of these checkpoints that no rank finds damaged.

        Args:
            storage: has them.
            steps: all checkpoints there, newest first.
            newest_step: those of later steps are left out.

        Raises:
            CheckpointDamaged: all of them are damaged.
        """

        ranks = self.ranks

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
            return self.ranks.run_on_all_ranks(
                lambda: self.training.finish_restore(begun, self.seed)
            ), traffic

        wanted = [s for s in steps if newest_step is None or s.step <= newest_step]
        loaded = load_newest_intact(storage.url, wanted, restore, ranks)
        position, traffic = loaded.result
        if self.ranks.rank == 0:
            log.info("%s: restored step %d: %s", storage.url, position.step, traffic)
        damaged = (f"step {stored.step} damaged" for stored in loaded.damaged)
        return Resumed(
            position,
            ", ".join([f"storage ({traffic.ratio:.2f} x)", *damaged]),
            LoadedCheckpoint(loaded.stored.step, max(stored.generation for stored in steps)),
        )

    def _begin(self) -> Resumed:
        """Begin a job that has neither a snapshot nor a checkpoint of its own."""
        if self.start_from is None:
            return Resumed(self.training.start_fresh(self.seed), "start", begins=True)
        position, source = self.training.start_from(self.start_from, self.seed)
        return Resumed(position, source, begins=True)

    def _server(self, holder: Member | ShardRebuild) -> str:
        """Return the address of a holder's server; that of this node is reached locally."""
        return self.assignment.server if holder.node == self.assignment.node else holder.server


def report_restored(session: Session, assignment: Assignment, resumed: Resumed) -> None:
    """Report to the agent that this worker has its state, and where it goes on."""
    generation, step = assignment.generation, resumed.position.step
    if resumed.loaded is not None:
        session.roll_back(generation, step)
    session.progress(generation, step)
    session.report(
        Restored(
            generation=generation,
            at_s=wall_clock_s(),
            source=resumed.source,
            step=step,
            loaded=resumed.loaded if assignment.rank == 0 else None,
        )
    )


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
