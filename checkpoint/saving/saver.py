"""Saves checkpoints while training goes on: copies the state, and has another process write it.

`Saver.save` returns once this rank's tensors are copied into shared memory, which is kept for the
next save. One save is in progress at most: the next one waits for it. A save that fails is never
fatal: its handle has the error, and the next save tells it on all ranks alike. (How the ranks
commit together, and why without collectives: `keepstep.checkpoint.saving.commit_round`.)

While no rank's layout changes, the plan of the last save is followed again, and ranks exchange some
hundred bytes each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import torch

from keepstep.checkpoint.agreement import on_all_ranks, on_all_ranks_gathering
from keepstep.checkpoint.collective import (
    Bytes,
    all_gather_json,
    default_store,
    gather_chunks,
    rank,
    world_size,
)
from keepstep.checkpoint.collective_plan import index_of
from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.layout.boxes import Box, Json, ShardIndex
from keepstep.checkpoint.live.digest import layout_digest
from keepstep.checkpoint.live.shared_buffer import SharedBuffer
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor
from keepstep.checkpoint.live.versions import WatchedTensors
from keepstep.checkpoint.saving.background import BackgroundSaver, BufferFile, SaveTask
from keepstep.checkpoint.saving.commit_round import as_told_by
from keepstep.checkpoint.saving.handle import SaveHandle
from keepstep.checkpoint.saving.messages import WritePart
from keepstep.checkpoint.saving.save_plan import SavePlan, plan_save
from keepstep.checkpoint.server.memory_budget import available_nbytes
from keepstep.checkpoint.state_mapping import StateMapping, capture

log = logging.getLogger("keepstep")

_Signature = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CachedPlan:
    """The last plan: for which layouts of all ranks, and for which tensors of this one."""

    key: str
    signature: _Signature
    plan: SavePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """This rank's state at a save. `documents` is JSON."""

    live: LiveState
    signature: _Signature
    documents: bytes


class Saver:
    """Saves without blocking training. Owns shared memory, a thread and a process; `close` ends it.

    Every rank needs one, and makes the same calls in the same order. Use it from one thread.

        with checkpoint.Saver() as saver:
            handle = saver.save(url, state, step=step)

    Args:
        peer_timeout_s: a save fails if a rank gives no sign of life for so long.
        close_timeout_s: how long `close` waits for the save in progress.
    """

    def __init__(self, *, peer_timeout_s: float = 30.0, close_timeout_s: float = 600.0) -> None:
        self._close_timeout_s = close_timeout_s
        self._background = BackgroundSaver(peer_timeout_s)
        self._buffer = SharedBuffer()
        self._buffer_file: BufferFile | None = None
        self._cached: _CachedPlan | None = None
        self._last: SaveHandle | None = None
        self._is_closed = False

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes, if it runs."""
        return self._background.writer_pid

    def save(self, url: str, state: StateMapping, *, step: int, generation: int = 0) -> SaveHandle:
        """Copy the state and return; the checkpoint is written and committed in the background.

        Waits for the save before it. Arguments as for `keepstep.checkpoint.save`.

        Raises:
            LayoutMismatch: the state cannot be stored; every rank raises.
            CheckpointError: this Saver is closed. What fails later is in the handle, also a tensor
                that another thread wrote to while it was copied (StateChanged).
        """
        if self._is_closed:
            raise CheckpointError("this Saver is closed; make another one")
        # The process starts while the first copy's memory is prepared.
        self._background.start()
        failure = self.finish()
        captured, answers = on_all_ranks_gathering(
            lambda: _capture(state),
            lambda captured: {
                "attempt": uuid.uuid4().hex,
                "layout": layout_digest(captured.live.tensors),
                "planned": self._planned_key(captured.signature),
                "documents": hashlib.sha256(captured.documents).hexdigest(),
                "failure": failure,
            },
        )
        self._last = None
        previous_error = told_failure([answer["failure"] for answer in answers])
        plan = self._plan(captured, answers)
        watched = WatchedTensors.of(captured.live.tensors)
        versions = watched.versions()
        by_key = {tensor.key: tensor for tensor in captured.live.tensors}
        collected = gather_chunks(plan.incomplete, plan.indexes, by_key)
        copy_error = self._copy(plan, captured.live.tensors, collected, watched, versions, step)
        outcome: Future[CheckpointError | None] = Future()
        self._background.submit(
            SaveTask(
                part=WritePart(
                    url=url,
                    directory=os.getcwd(),
                    step=step,
                    generation=generation,
                    attempt=answers[0]["attempt"],
                ),
                buffer=self._buffer_file,
                plan=plan.encoded,
                documents=captured.documents,
                sends_documents=answers[rank()]["documents"] != answers[0]["documents"],
                copy_error=copy_error,
                rank=rank(),
                world_size=world_size(),
                store=default_store() if world_size() > 1 else None,
                outcome=outcome,
            )
        )
        keys = [tensor.key for tensor in watched.tensors]
        self._last = SaveHandle(
            url, step, generation, dict(zip(keys, versions, strict=True)), previous_error, outcome
        )
        return self._last

    def finish(self) -> Json:
        """Wait for the save in progress; return why the last one failed, to be told to all ranks.

        The result is None if it did not, and once the next save has told it.
        """
        self._background.wait_idle()
        last = self._last
        if last is None or last.error is None:
            return None
        return f"step {last.step} was not stored: {as_told_by(rank(), last.error)}"

    def forget_failure(self) -> None:
        """Note that all ranks have been told the last save's failure."""
        self._last = None

    def close(self) -> None:
        """Finish the save in progress, for `close_timeout_s` at most, and free everything."""
        if not self._is_closed:
            self._is_closed = True
            self._background.close(self._close_timeout_s)
            self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _planned_key(self, signature: _Signature) -> str | None:
        """Return for which layouts this rank has a plan that fits these tensors."""
        cached = self._cached
        return cached.key if cached is not None and cached.signature == signature else None

    def _plan(self, captured: _Captured, answers: Sequence[Json]) -> SavePlan:
        """Return the last plan if all ranks have it and it fits, else a new one."""
        layouts = json.dumps([answer["layout"] for answer in answers])
        key = hashlib.sha256(layouts.encode()).hexdigest()
        cached = self._cached
        if cached is not None and all(answer["planned"] == key for answer in answers):
            return cached.plan
        tensors = captured.live.tensors
        own_index = index_of(LiveState(tensors, {})).to_json()
        indexes = [ShardIndex.from_json(index) for index in all_gather_json(own_index)]
        plan = on_all_ranks(lambda: plan_save(rank(), tensors, indexes))
        self._cached = _CachedPlan(key=key, signature=captured.signature, plan=plan)
        return plan

    def _copy(
        self,
        plan: SavePlan,
        tensors: Sequence[LiveTensor],
        collected: Mapping[tuple[str, Box], Bytes],
        watched: WatchedTensors,
        versions: Sequence[int],
        step: int,
    ) -> CheckpointError | None:
        """Copy what this rank writes into the shared buffer; return why the copy is not good."""
        copied = [tensors[i] for i in plan.copied]
        try:
            if self._buffer.reserve(plan.nbytes, _device_of(copied), available_nbytes):
                self._buffer_file = BufferFile(self._buffer.descriptor, self._buffer.nbytes)
            self._buffer.copy(copied, plan.entries)
            for place, data in collected.items():
                self._buffer.put(plan.pieces[place], data.reshape(-1).data)
            watched.check_unchanged(versions, step)
        except CheckpointError as error:
            return error
        except (RuntimeError, OSError) as error:
            return CheckpointError(f"step {step}: this rank's tensors were not copied: {error}")
        return None


def told_failure(failures: Sequence[Json]) -> RankFailed | None:
    """Return the failure of the last save that all ranks know now, and log it; None if it stands.

    Args:
        failures: what `Saver.finish` returned on each rank.
    """
    told = next((failure for failure in failures if failure is not None), None)
    if told is None:
        return None
    log.warning("%s; training goes on, and this save is a new attempt", told)
    return RankFailed(told)


def _capture(state: StateMapping) -> _Captured:
    live = capture(state)
    return _Captured(
        live=live,
        signature=tuple(
            (tensor.key, tensor.data.dtype, tensor.data.shape, tensor.global_shape, tensor.box)
            for tensor in live.tensors
        ),
        documents=json.dumps(dict(live.documents)).encode(),
    )


def _device_of(tensors: Sequence[LiveTensor]) -> torch.device:
    """Return the GPU that tensors are on; the CPU if none is on any."""
    devices = (tensor.data.device for tensor in tensors)
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
