"""Carries out saves beside training: a light thread that waits, and the process that writes.

The thread does nothing that holds the GIL for long: it waits for the process's reply and for other
ranks, and passes on what it gets as bytes.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from keepstep.checkpoint.errors import CheckpointError, RankFailed
from keepstep.checkpoint.saving.commit_round import CommitRound
from keepstep.checkpoint.saving.messages import PartReport, WritePart, encode_publication
from keepstep.checkpoint.saving.store_calls import StoreCalls
from keepstep.checkpoint.saving.writer_process import WriterProcess

log = logging.getLogger("keepstep")

QUIET_PARTS = 6
"""A copy goes on for this part of the patience of others before this rank says anything, or before
the save is submitted."""

_END_S = 10.0
"""How long a save that was given up may take to end, in seconds."""


@dataclass(frozen=True, slots=True)
class BufferFile:
    """The shared buffer's file, which the thread's owner closes when no save is in progress."""

    descriptor: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The end of a copy: the buffer that it is in, or why it is not good."""

    buffer: BufferFile | None
    error: CheckpointError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """One save on one rank.

    Attributes:
        part: what to write.
        copied: is set when the copy has ended; until then signs of life are given.
        plan: the encoded `PartPlan`; the same object while it has not changed.
        documents: the rank's documents, as JSON.
        sends_documents: there are any, and the rank is not rank 0.
        rank: this rank.
        world_size: the number of ranks.
        store: the job's; None if there is one rank.
        outcome: gets the save's error, or None when it is committed.
    """

    part: WritePart
    copied: Future[Copied]
    plan: bytes
    documents: bytes
    sends_documents: bool
    rank: int
    world_size: int
    store: Store | None
    outcome: Future[CheckpointError | None]


class BackgroundSaver:
    """Owns the thread and the process; `start` starts both, `close` ends both.

    Args:
        peer_timeout_s: how long to wait for a rank, or a store, that gives no sign of life.
    """

    def __init__(self, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._tasks: queue.SimpleQueue[SaveTask | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._has_next = threading.Event()
        self._given_up = threading.Event()
        self._calls = StoreCalls(peer_timeout_s, self._given_up)
        self._current: SaveTask | None = None
        self._has_started = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: WriterProcess | None = None
        # What the process has, to be sent again only when it changes.
        self._sent_buffer: BufferFile | None = None
        self._sent_plan: bytes | None = None
        self._last_round: CommitRound | None = None
        self._is_idle.set()

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes, if it runs."""
        process = self._process
        return process.pid if process is not None and process.is_running else None

    def start(self) -> None:
        """Start the thread and the process, unless they run. An interpreter that exits cannot."""
        if self._thread is None:
            # The process is started by the thread: the kernel ties its life to the thread's, and
            # the thread that calls this may end before the interpreter does.
            self._thread = threading.Thread(target=self._run, name="keepstep-save", daemon=True)
            self._thread.start()
            self._has_started.wait()

    def submit(self, task: SaveTask) -> None:
        """Carry out a save; the one before is over."""
        assert self._is_idle.is_set(), "one save is in progress at most"
        if task.store is not None and not self._calls.is_running:
            # A store that did not answer may have been another process group's.
            self._calls.close()
            self._calls = StoreCalls(self._peer_timeout_s, self._given_up)
            self._calls.start()
        self._is_idle.clear()
        self._has_next.set()
        self._current = task
        self._tasks.put(task)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in progress; return whether that is so."""
        return self._is_idle.wait(timeout_s)

    def end_process(self) -> None:
        """End the process, which frees its buffer; the next part is written by another.

        Not while a part is written: no save is in progress, or its copy has not ended.
        """
        if self._process is not None:
            self._process.close()

    def close(self, timeout_s: float) -> None:
        """Finish the save in progress, then end. A save that takes longer than this is given up."""
        if self._thread is None:
            return
        self._tasks.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up.set()
            if self._process is not None:
                self._process.kill()
            self._thread.join(_END_S)
        if self._thread.is_alive():
            log.warning("a save that was given up does not end; it is left to the process's end")
            if (task := self._current) is not None:
                _settle(task.outcome, CheckpointError("the save was given up, and does not end"))
        self._calls.close()
        self._thread = None

    def _run(self) -> None:
        try:
            try:
                self._start_process()
            finally:
                self._has_started.set()
            while (task := self._tasks.get()) is not None:
                self._has_next.clear()
                self._perform(task)
                # It has the process group's store, which the group's end is to free.
                if self._current is task:
                    self._current = None
                del task
        finally:
            if self._process is not None:
                self._process.close()

    def _start_process(self) -> CheckpointError | None:
        try:
            self._process = WriterProcess.start()
        except OSError as error:
            return CheckpointError(f"the process that writes checkpoints did not start: {error}")
        self._sent_buffer, self._sent_plan = None, None
        return None

    def _perform(self, task: SaveTask) -> None:
        """Write and commit; set the outcome."""
        commit_round: CommitRound | None = None
        try:
            # The copy's thread has the GIL and a core to itself: others miss no sign of life yet.
            wait([task.copied], self._peer_timeout_s / QUIET_PARTS)
            if self._last_round is not None:
                self._last_round.forget()
            commit_round = self._last_round = CommitRound(
                task.store,
                task.rank,
                task.world_size,
                task.part.attempt,
                self._peer_timeout_s,
                self._calls,
            )
            commit_round.tick()
            self._write_and_commit(task, commit_round)
            _settle(task.outcome, None)
        except CheckpointError as error:
            _settle(task.outcome, error)
        except Exception as error:  # noqa: BLE001 - the thread's edge: somebody may wait
            _settle(task.outcome, CheckpointError(f"the save failed: {error!r}"))
        finally:
            if commit_round is not None and task.rank != 0:
                commit_round.leave()
            self._is_idle.set()
            if commit_round is not None and task.rank == 0:
                # The next save does not wait for it.
                commit_round.await_others(self._has_next.is_set)

    def _write_and_commit(self, task: SaveTask, commit_round: CommitRound) -> None:
        if task.rank != 0:
            try:
                report = self._write(task, commit_round)
            except CheckpointError as error:
                # What this rank's part failed of says more than that the store is gone, too.
                with suppress(RankFailed):
                    commit_round.report_failure(str(error))
                raise
            commit_round.report(report)
            commit_round.outcome()
            return
        failure: CheckpointError | None = None
        try:
            commit_round.report(self._write(task, commit_round))
            publication = encode_publication(task.documents, commit_round.collect())
            assert self._process is not None, "it wrote the part"
            self._process.publish(publication, commit_round.tick, commit_round.tick_s)
        except CheckpointError as error:
            failure = error
        commit_round.conclude(failure)
        if failure is not None:
            raise failure

    def _write(self, task: SaveTask, commit_round: CommitRound) -> bytes:
        """Have this rank's part written, once it is copied; return the report of it."""
        while not wait([task.copied], commit_round.tick_s).done:
            commit_round.tick()
        copied = task.copied.result()
        if copied.error is not None:
            raise copied.error
        process = self._running_process()
        if copied.buffer is not None and copied.buffer is not self._sent_buffer:
            process.use_buffer(copied.buffer.descriptor, copied.buffer.nbytes)
            self._sent_buffer = copied.buffer
        if task.plan is not self._sent_plan:
            process.use_plan(task.plan)
            self._sent_plan = task.plan
        written = process.write(task.part, commit_round.tick, commit_round.tick_s)
        report = PartReport(
            name=written.name,
            nbytes=written.nbytes,
            crc32c=written.crc32c,
            content=written.content,
        )
        return report.encode(task.documents if task.sends_documents else b"null")

    def _running_process(self) -> WriterProcess:
        if self._process is None or not self._process.is_running:
            error = self._start_process()
            if error is not None:
                raise error
        assert self._process is not None, "it was started"
        return self._process


def _settle(outcome: Future[CheckpointError | None], error: CheckpointError | None) -> None:
    """Set the outcome of a save, unless it was given up before."""
    with suppress(InvalidStateError):
        outcome.set_result(error)
