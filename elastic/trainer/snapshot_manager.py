"""Keeping snapshots of the training state of one worker in one generation, and resuming from what was kept.

The state is immutable from one optimizer step to the next, so the copy begins when a step ends and is waited for just before an optimizer
writes again (DataStates-LLM, arXiv 2406.10707). What others than optimizers may write to at any time (buffers, averages of the
weights) is copied on the spot, and so is everything once a write in between has been seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from keepstep import monitor
from keepstep.checkpoint.errors import StateChanged
from keepstep.checkpoint.layout.source import Source
from keepstep.checkpoint.live.copier import Snapshotter
from keepstep.checkpoint.memory.client import SnapshotClient
from keepstep.checkpoint.memory.memory_source import Holder, MemorySource
from keepstep.checkpoint.stored.reader import StoredCheckpoint, list_steps
from keepstep.checkpoint.stored.storage import open_storage
from keepstep.elastic.rendezvous.records import Member, ShardRebuild
from keepstep.elastic.trainer.data import Position
from keepstep.elastic.trainer.process_groups import is_peer_failure
from keepstep.elastic.trainer.snapshot_interval import SnapshotInterval
from keepstep.elastic.trainer.training_state import TrainingState
from keepstep.elastic.worker.session import Assignment

if TYPE_CHECKING:
    from keepstep.elastic.trainer.state import State

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class _Agreement:
    """What all ranks say of the next snapshot and of the last one."""

    is_wanted: bool
    is_committed: bool
    is_complete: bool

    @property
    def is_possible(self) -> bool:
        """Whether nothing of the last snapshot is in the way: it is committed, or given up."""
        return self.is_committed or not self.is_complete

    @property
    def is_worth_retrying(self) -> bool:
        """Whether the answer may be another a little later."""
        return self.is_wanted and not self.is_possible


class SnapshotManager:
    """The state of one worker in one generation, and its snapshots. `close` ends the copy under way and frees everything."""

    def __init__(
        self,
        state: State,
        device: torch.device,
        assignment: Assignment,
        checkpoint: str | None,
        is_committed: Callable[[int], bool],
        interval: SnapshotInterval,
        *,
        copies_synchronously: bool = False,
    ) -> None:
        self._snapshot_interval = interval
        self._blocked_s = 0.0
        self._step = 0
        self._assignment = assignment
        self._checkpoint = checkpoint
        self.training = TrainingState(state, device, assignment.rank)
        self._client = SnapshotClient(assignment.server, bytes.fromhex(assignment.secret))
        self._snapshotter = Snapshotter(
            self._client, assignment.generation, assignment.rank, device
        )
        self._taken = -1
        self._is_intact = True
        # The last snapshot was torn here; by all ranks' agreement it is given up, for one of them has torn it.
        self._is_torn = self._discard_uncommitted = False
        self.copies_synchronously = copies_synchronously
        """Whether none is left to a copy under the next step any more, because something writes to the state meanwhile."""
        self._is_committed = is_committed
        self._pending_agreement: tuple[torch.Tensor, dist.Work | None] | None = None
        self._in_step = False
        self._hooks = (
            *(
                o.register_step_pre_hook(lambda *_: self._before_write())
                for o in self.training.optimizers
            ),
            state.model.register_forward_hook(lambda *_: self._after_forward()),
        )

    def resume(self, seed: int) -> tuple[Position, str]:
        """Fill the state from memory, else from storage, else leave it as built; return the position and the source's name."""
        source, name = self._source()
        if source is None:
            return self.training.start_fresh(seed), name
        position = self.training.restore_from(source, seed)
        if isinstance(source, MemorySource):
            name = source.describe()
            source.close()
        self._step = position.step
        return position, name

    def complete_step(self, position: Position) -> None:
        """Note that the optimizer has written all that it writes in this step, and begin a snapshot if it is time for one.

        Ranks must take the same snapshots or none would ever be complete: they take one if all want one and know, by the time
        the optimizer runs, that the last one is committed, or one of them knows that it never will be. They agree by a reduction of
        three numbers that runs beside the backward pass; if the commit was not known then, by another beside the optimizer.
        """
        self._in_step = False
        self._step = position.step
        if self._pending_agreement is not None:
            answer, self._pending_agreement = self._finish_agreement(), None
            self._is_intact = True
            if answer.is_wanted and answer.is_possible:
                began_s = time.monotonic()
                self.snapshot(position)
                self._blocked_s = time.monotonic() - began_s
        self._snapshot_interval.note_step(time.monotonic())

    def seal_before_closing(
        self, position: Position, wait_for_commit: Callable[[int], bool]
    ) -> None:
        """Have the state at `position` sealed if it is still whole, for the generation ends in good order.

        Args:
            position: what the state is of.
            wait_for_commit: waits for a step's commit; False if that will not come.
        """
        while self._is_intact and self._taken != position.step and position.step > 0:
            self._wait()
            if self._is_torn:
                return
            if not self.snapshot(position) and not wait_for_commit(self._taken):
                return
        self._wait()

    def begin_step(self) -> None:
        """Note that all ranks do the same from here on, until the step is complete."""
        self._in_step = True

    def _after_forward(self) -> None:
        # Outside of steps ranks may well do different things, such as one of them evaluating.
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
            self._start_agreement()

    def _start_agreement(self) -> None:
        """Begin to ask all ranks whether they want a snapshot, know that the last one is committed, and sealed it."""
        is_wanted = self._snapshot_interval.is_wanted(self._step + 1, self._taken)
        mine = torch.tensor(
            [int(is_wanted), int(self._is_committed(self._taken)), int(not self._is_torn)]
        )
        work = (
            dist.all_reduce(mine, dist.ReduceOp.MIN, async_op=True)
            if dist.get_world_size() > 1
            else None
        )
        self._pending_agreement = (mine, work)

    def _finish_agreement(self) -> _Agreement:
        """Wait for the answer, which is the same on every rank."""
        assert self._pending_agreement is not None
        all_of_us, work = self._pending_agreement
        if work is not None:
            work.wait()
        answer = _Agreement(*map(bool, all_of_us.tolist()))
        self._discard_uncommitted = not answer.is_complete
        return answer

    def snapshot(self, position: Position) -> bool:
        """Begin to copy the state as it is now; False if the last snapshot is not committed yet, so that none can begin."""
        if not self._may_begin():
            return False
        if self.copies_synchronously:
            # It may be because a step puts other memory under its tensors.
            self.training.invalidate_if_moved()
        with monitor.phase(monitor.Phase.CHECKPOINT):
            live = self.training.capture(position)
            self._snapshotter.start(
                position.step,
                live.tensors,
                live.documents,
                discard_uncommitted=self._discard_uncommitted,
            )
        self._taken, self._is_torn, self._discard_uncommitted = position.step, False, False
        if self.copies_synchronously:
            self._wait()
        return True

    def _may_begin(self) -> bool:
        """Whether this rank's last snapshot is committed, or given up by all."""
        return self._discard_uncommitted or self._is_committed(self._taken)

    def _wait(self) -> None:
        """Wait for the copy under way."""
        try:
            self._snapshotter.wait()
        except StateChanged as changed:
            self._is_torn = True
            if not self.copies_synchronously:
                self.copies_synchronously = True
                log.warning(
                    "%s: from now on training waits while state is copied. Write to it inside `with job.step()` only",
                    changed,
                )

    def commit_final_snapshot(
        self, position: Position, wait_for_commit: Callable[[int], bool]
    ) -> bool:
        """Have the state at `position`, which nobody writes to any more, committed; False if the generation closes before that.

        Called by all ranks together.
        """
        self.seal_before_closing(position, wait_for_commit)
        try:
            self._start_agreement()
            self._finish_agreement()
        except RuntimeError as error:
            if is_peer_failure(error):
                return False
            raise
        if self._discard_uncommitted:
            self.copies_synchronously = True
            self.snapshot(position)
        return wait_for_commit(position.step)

    def close(self) -> None:
        """Let a copy under way complete, then let go of everything."""
        for hook in self._hooks:
            hook.remove()
        self._snapshotter.close()
        self._client.close()

    def _source(self) -> tuple[Source | None, str]:
        resume = self._assignment.resume
        if resume is not None:
            holders = [
                Holder(self._server(member), tuple(member.ranks)) for member in resume.holders
            ]
            # Later ones count: a lost rank's shard is with whoever rebuilds it.
            holders += [
                Holder(self._server(adopted), (adopted.rank,), rebuilds=True)
                for adopted in resume.shard_rebuilds
            ]
            snapshot = resume.snapshot
            stored = partial(
                StoredCheckpoint.open, resume.stored, snapshot.step, snapshot.generation
            )
            return MemorySource(
                snapshot,
                holders,
                bytes.fromhex(self._assignment.secret),
                rank=self._assignment.rank,
                open_fallback=stored if resume.stored else None,
            ), "memory"
        if self._checkpoint is None:
            return None, "start"
        step = self._newest_stored(self._checkpoint)
        return (
            (StoredCheckpoint.open(self._checkpoint, step), "storage")
            if step >= 0
            else (None, "start")
        )

    def _server(self, holder: Member | ShardRebuild) -> str:
        """Return where a holder's server is reached: the own node's beside this worker."""
        return self._assignment.server if holder.node == self._assignment.node else holder.server

    def _newest_stored(self, url: str) -> int:
        """Have rank 0 look, so that all ranks resume from the same step whatever appears meanwhile."""
        found = torch.tensor([-1])
        if self._assignment.rank == 0:
            open_storage(url).probe_writable()
            found[0] = next((stored.step for stored in list_steps(url)), -1)
        dist.broadcast(found, src=0)
        return int(found.item())
