"""Saves checkpoints while training goes on: copies the state, and has another process write it.

`Saver.save` returns once this rank's tensors are copied into shared memory, which is kept for the
next save. One save is in progress at most: the next one waits for it. A save that fails is never
fatal: its handle has the error, and the next save reports it on all ranks. How the ranks commit
together is in `keepstep.checkpoint.saving.commit`. The thread that commits has a group of gloo of
its own: its messages and training's would meet in different orders on different ranks.

While no rank's layout changes, the plan of the last save is followed again, and ranks exchange one
message, and the pieces of chunks if there are any. Each copies meanwhile what it would write by
that plan: if the plan turns out to be out of date, the copy was in vain.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup

from keepstep.available_memory import available_nbytes
from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.descriptions import NOT_DESCRIBED, Descriptions
from keepstep.checkpoint.format.stored.chunking import Compression
from keepstep.checkpoint.format.stored.urls import parse_url, url_text
from keepstep.checkpoint.live.fills import Bytes
from keepstep.checkpoint.live.shared_buffer import SharedBuffer
from keepstep.checkpoint.live.state_mapping import StateMapping, capture
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor
from keepstep.checkpoint.live.versions import WatchedTensors
from keepstep.checkpoint.ranks.collective_plan import (
    PlanCache,
    SharedPlan,
    agree_on_save,
)
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS, ControlGroup, separate_group
from keepstep.checkpoint.ranks.piece_exchange import exchange_pieces
from keepstep.checkpoint.saving.background import (
    BackgroundSaver,
    BufferFile,
    Copied,
    SaveTask,
)
from keepstep.checkpoint.saving.handle import SaveHandle
from keepstep.checkpoint.saving.messages import WritePart
from keepstep.checkpoint.saving.save_plan import SavePlan, plan_save

log = logging.getLogger("keepstep")

_MEETING_S = 120.0
"""How long ranks wait for each other at least where each has come to the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Capture:
    """This rank's state as it was found for a save.

    Attributes:
        watched: the tensors whose writes are counted.
        versions: their version counters then.
        plan: by which a copy has begun already; None if none has.
        copied: the end of that copy.
    """

    watched: WatchedTensors
    versions: list[int]
    plan: SavePlan | None = None
    copied: Future[None] | None = None


class Saver:
    """Saves without blocking training. Owns shared memory, a thread and a process; `close` ends it.

    Every rank needs one, and makes the same calls in the same order. Use it from one thread.

        with checkpoint.Saver() as saver:
            handle = saver.save(url, state, step=step)

    Args:
        process_group: the ranks that save together; None for the default group, or for one process
            without any.
        peer_timeout_s: a save fails if a rank sends no heartbeat for so long.
        close_timeout_s: how long `close` waits for the save in progress.
    """

    def __init__(
        self,
        *,
        process_group: ProcessGroup | None = None,
        peer_timeout_s: float = 30.0,
        close_timeout_s: float = 600.0,
    ) -> None:
        self.process_group = process_group
        self._close_timeout_s = close_timeout_s
        self._peer_timeout_s = peer_timeout_s
        self._background = BackgroundSaver(peer_timeout_s)
        self._buffer = SharedBuffer()
        self._buffer_file: BufferFile | None = None
        self._plans = PlanCache()
        self._plan: SavePlan | None = None
        self._last: SaveHandle | None = None
        self._last_rank = 0
        self._separate: ControlGroup | None = None
        self._separate_from = _reference(None)
        self._is_closed = False

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes, if it runs."""
        return self._background.writer_pid

    def save(
        self,
        url: str | os.PathLike[str],
        state: StateMapping,
        *,
        step: int,
        generation: int = 0,
        descriptions: Descriptions = NOT_DESCRIBED,
        config: Json = None,
        compression: Compression | None = None,
    ) -> SaveHandle:
        """Copy the state and return; the checkpoint is written and committed in the background.

        Waits for the save before it. Arguments as for `keepstep.checkpoint.save`.

        Raises:
            LayoutMismatch: the state cannot be stored; every rank raises.
            CheckpointError: this Saver is closed, or an argument is invalid or differs between
                ranks. What fails later is in the handle, also a tensor that another thread wrote to
                while it was copied (StateChanged).
        """
        if self._is_closed:
            raise CheckpointError("this Saver is closed; make another one")
        group = CONTROL_GROUPS.of(self.process_group)
        # The process starts while the first copy's memory is prepared.
        self._background.start()
        failure = self.finish()
        captured: _Capture | None = None

        def begin(tensors: Sequence[LiveTensor], shared: SharedPlan | None) -> None:
            nonlocal captured
            captured = self._captured(tensors, shared)

        def prepare() -> LiveState:
            parse_url(url_text(url))
            return capture(state, descriptions, config)

        agreed = agree_on_save(
            prepare,
            failure,
            self._plans,
            group,
            compression,
            step=step,
            generation=generation,
            block=False,
            begin=begin,
        )
        assert captured is not None, "all ranks have captured their states"
        self._last = None
        previous_error = report_previous_failure(agreed.failures)
        tensors = agreed.live.tensors
        stored, target = agreed.stored, url_text(url)

        # The ranks have all made a new plan, or none has.
        plan = self._plan
        if plan is None or plan.shared is not agreed.plan:
            self._plan = None
            plan = self._plan = self._planned(tensors, agreed.plan, group)
        documents = json.dumps(dict(agreed.documents)).encode()
        outcome: Future[CheckpointError | None] = Future()
        copied: Future[Copied] = Future()
        keys = [tensor.key for tensor in captured.watched.tensors]
        versions = dict(zip(keys, captured.versions, strict=True))
        self._last_rank = group.global_ranks[group.rank]
        self._last = SaveHandle(
            target, stored.step, stored.generation, versions, previous_error, outcome
        )
        task = SaveTask(
            part=WritePart(
                url=target,
                directory=os.getcwd(),
                step=stored.step,
                generation=stored.generation,
                attempt=agreed.attempt,
            ),
            copied=copied,
            plan=plan.encoded,
            documents=documents,
            group=self._commit_group(group, agreed.attempt, has_failed=previous_error is not None),
            outcome=outcome,
        )
        # Other ranks may have copied long before, and wait for this one's heartbeats.
        self._background.submit(task)
        copy_error: CheckpointError | None = CheckpointError("the copy was interrupted")
        try:
            pieces = exchange_pieces(plan.shared.rounds, tensors, group)
            copy_error = self._copy(plan, pieces, tensors, captured, stored.step)
        except CheckpointError as error:
            copy_error = error
        finally:
            copied.set_result(Copied(self._buffer_file, copy_error))
        return self._last

    def _commit_group(self, group: ControlGroup, attempt: str, *, has_failed: bool) -> ControlGroup:
        """Return the group that the thread sends messages in, of the same ranks.

        Args:
            group: the ranks.
            attempt: names a new group.
            has_failed: the last save has failed on a rank, which may have broken the old one.
        """
        if self._separate is None or has_failed or self._separate_from() is not group.collectives:
            self._separate = None
            timeout = timedelta(seconds=max(self._peer_timeout_s, _MEETING_S))
            self._separate = separate_group(group, f"keepstep/save/{attempt}", timeout)
            self._separate_from = _reference(group.collectives)
        return self._separate

    def finish(self) -> Json:
        """Wait for the save in progress; return why the last one failed, to report on all ranks.

        The result is None if it did not, and once the next save has reported it.
        """
        self._background.wait_idle()
        last = self._last
        if last is None or last.error is None:
            return None
        reason = last.error
        cause = reason if isinstance(reason, RankFailed) else f"rank {self._last_rank}: {reason}"
        return f"step {last.step} was not stored: {cause}"

    def forget_failure(self) -> None:
        """Note that all ranks have reported that the last save has failed on one of them."""
        self._last = self._separate = None

    def close(self) -> None:
        """Finish the save in progress, for `close_timeout_s` at most, and free everything.

        That it failed is logged, for no other save follows that could tell it.
        """
        if not self._is_closed:
            self._is_closed = True
            self._background.close(self._close_timeout_s)
            self._separate = None
            self._buffer.close()
            if self._last is not None and self._last.error is not None:
                log.error("step %d was not stored: %s", self._last.step, self._last.error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _planned(
        self, tensors: Sequence[LiveTensor], shared: SharedPlan, group: ControlGroup
    ) -> SavePlan:
        """Plan this rank's part; if that fails on one rank, all raise, and plan again next time."""
        try:
            return group.run_on_all_ranks(lambda: plan_save(group.rank, tensors, shared))
        except BaseException:
            self._plans.keep(None)
            raise

    def _captured(self, tensors: Sequence[LiveTensor], shared: SharedPlan | None) -> _Capture:
        """Note the tensors' versions, and begin to copy them if the last plan fits them."""
        watched = WatchedTensors.of(tensors)
        versions = watched.versions()
        plan = self._plan
        if plan is None or plan.shared is not shared:
            return _Capture(watched=watched, versions=versions)
        copied = [tensors[i] for i in plan.copied]
        if not self._buffer.fits(plan.nbytes, _device_of(copied)):
            return _Capture(watched=watched, versions=versions)
        try:
            done = self._buffer.begin_copy(copied, plan.entries)
        except RuntimeError:
            # It is tried again when the ranks have agreed; then the save alone fails.
            return _Capture(watched=watched, versions=versions)
        return _Capture(watched=watched, versions=versions, plan=plan, copied=done)

    def _copy(
        self,
        plan: SavePlan,
        pieces: Mapping[tuple[str, Box], Bytes],
        tensors: Sequence[LiveTensor],
        captured: _Capture,
        step: int,
    ) -> CheckpointError | None:
        """Copy what this rank writes into the shared buffer; return why the copy is not good."""
        try:
            done = captured.copied
            if done is None or captured.plan is not plan:
                done = self._begin_copy(plan, [tensors[i] for i in plan.copied])
            for place, data in pieces.items():
                self._buffer.put(plan.pieces[place], data.reshape(-1).data)
            done.result()
            captured.watched.check_unchanged(captured.versions, step)
        except CheckpointError as error:
            return error
        except (RuntimeError, OSError, MemoryError) as error:
            return CheckpointError(f"step {step}: this rank's tensors were not copied: {error}")
        return None

    def _begin_copy(self, plan: SavePlan, tensors: Sequence[LiveTensor]) -> Future[None]:
        """Begin to copy tensors, once there is a buffer for them."""
        device = _device_of(tensors)
        if self._buffer.nbytes and not self._buffer.fits(plan.nbytes, device):
            # The process holds the memory of the old one, and there may not be enough for both.
            self._buffer.close()
            self._background.end_process()
        if self._buffer.reserve(plan.nbytes, device, available_nbytes):
            self._buffer_file = BufferFile(self._buffer.descriptor, self._buffer.nbytes)
        return self._buffer.begin_copy(tensors, plan.entries)


def report_previous_failure(failures: Sequence[Json]) -> RankFailed | None:
    """Log and return the last save's failure, the same on all ranks; None if it succeeded.

    Args:
        failures: what `Saver.finish` returned on each rank.
    """
    first_failure = next((failure for failure in failures if failure is not None), None)
    if first_failure is None:
        return None
    log.warning("%s; training goes on, and this save is a new attempt", first_failure)
    return RankFailed(first_failure)


def _device_of(tensors: Sequence[LiveTensor]) -> torch.device:
    """Return the GPU that tensors are on; the CPU if none is on any."""
    devices = (tensor.data.device for tensor in tensors)
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _reference(collectives: Any) -> Callable[[], Any]:
    """Return what returns a group as long as others hold it, which frees its connections."""
    return (lambda: None) if collectives is None else weakref.ref(collectives)
