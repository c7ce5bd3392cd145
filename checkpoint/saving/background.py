"""Saves while training goes on: a light thread waits, and a process writes.

The thread does nothing that holds the GIL for long: it waits for the process's reply and for other
ranks, and passes on what it gets as bytes.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.ranks.control_group import ControlGroup
from keepstep.checkpoint.saving.commit import commit_together
from keepstep.checkpoint.saving.messages import Publish, Published, WritePart, Written
from keepstep.checkpoint.saving.parts import encode_report, encode_reports
from keepstep.checkpoint.saving.writer_process import WriterProcess

log = logging.getLogger("keepstep")

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
        copied: is set when the copy has ended; until then heartbeats are sent.
        plan: the encoded `PartPlan`; the same object while it has not changed.
        documents: the rank's documents, as JSON.
        group: the ranks, in a group of which only this thread sends messages.
        outcome: gets the save's error, or None when it is committed.
    """

    part: WritePart
    copied: Future[Copied]
    plan: bytes
    documents: bytes
    group: ControlGroup
    outcome: Future[CheckpointError | None]


class BackgroundSaver:
    """Owns the thread and the process; `start` starts both, `close` ends both.

    Args:
        peer_timeout_s: how long to wait for a rank that sends no heartbeat.
    """

    def __init__(self, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._tasks: queue.SimpleQueue[SaveTask | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._given_up = threading.Event()
        self._current: SaveTask | None = None
        self._has_started = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: WriterProcess | None = None
        # What the process has, to be sent again only when it changes.
        self._sent_buffer: BufferFile | None = None
        self._sent_plan: bytes | None = None
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
        self._is_idle.clear()
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
        self._thread = None

    def _run(self) -> None:
        try:
            try:
                self._start_process()
            finally:
                self._has_started.set()
            while (task := self._tasks.get()) is not None:
                self._perform(task)
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
        try:
            commit_together(_ProcessPart(task, self), task.group, self._peer_timeout_s)
            _settle(task.outcome, None)
        except CheckpointError as error:
            _settle(task.outcome, error)
        except Exception as error:  # noqa: BLE001 - the thread's edge: somebody may wait
            _settle(task.outcome, CheckpointError(f"the save failed: {error!r}"))
        finally:
            if self._process is not None and self._process.is_busy:
                # Another rank has failed meanwhile: nobody waits for this one's part.
                self._process.kill()
                self._process.close()
            self._is_idle.set()

    def check_not_given_up(self) -> None:
        """Raise CheckpointError if the owner does not wait for the save any longer."""
        if self._given_up.is_set():
            raise CheckpointError("the save was given up on this rank, which does not wait longer")

    def process_for(self, task: SaveTask, buffer: BufferFile | None) -> WriterProcess:
        """Return the process, which has the buffer and the plan of a save.

        Raises:
            CheckpointError: it does not start, or has ended.
        """
        if self._process is None or not self._process.is_running:
            error = self._start_process()
            if error is not None:
                raise error
        process = self._process
        assert process is not None, "it was started"
        if buffer is not None and buffer is not self._sent_buffer:
            process.use_buffer(buffer.descriptor, buffer.nbytes)
            self._sent_buffer = buffer
        if task.plan is not self._sent_plan:
            process.use_plan(task.plan)
            self._sent_plan = task.plan
        return process


class _ProcessPart:
    """Has the process write this rank's part, once it is copied; a `PartWriter`."""

    def __init__(self, task: SaveTask, background: BackgroundSaver) -> None:
        self._task = task
        self._background = background
        self._process: WriterProcess | None = None
        self._report = b""
        self._is_publishing = False

    def write(self, limit_s: float | None) -> bool:
        """Wait for the copy, and then for the part."""
        self._background.check_not_given_up()
        task = self._task
        if self._process is None:
            if not wait([task.copied], limit_s).done:
                return False
            copied = task.copied.result()
            if copied.error is not None:
                raise copied.error
            self._process = self._background.process_for(task, copied.buffer)
            self._process.begin(task.part)
        written = self._process.reply(Written, limit_s)
        if written is None:
            return False
        self._report = encode_report(written.listing, task.documents)
        return True

    def report(self) -> bytes:
        """Return the report of the part."""
        return self._report

    def publish(self, reports: Sequence[memoryview], limit_s: float | None) -> bool:
        """Have the process publish the checkpoint, and wait for that."""
        self._background.check_not_given_up()
        assert self._process is not None, "it wrote the part"
        if not self._is_publishing:
            self._is_publishing = True
            self._process.begin(Publish(), encode_reports(reports))
        return self._process.reply(Published, limit_s) is not None


def _settle(outcome: Future[CheckpointError | None], error: CheckpointError | None) -> None:
    """Set the outcome of a save, unless it was given up before."""
    with suppress(InvalidStateError):
        outcome.set_result(error)
