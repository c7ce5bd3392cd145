"""Runs worker processes: starts, observes and ends them, with everything that they start.

A `Worker` owns one process, the connection to it and its progress board; `close` ends all three.
What the worker reports and how it exits reaches the agent through one callback, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import psutil

from keepstep.elastic.agent.fork_server_process import ForkingUnavailable, ForkServerProcess
from keepstep.elastic.errors import JobFailed
from keepstep.elastic.worker.log_files import copies_output
from keepstep.elastic.worker.messages import (
    PROTOCOL,
    AgentMessage,
    Assign,
    Assignment,
    Command,
    Stop,
    WorkerMessage,
)
from keepstep.monitor.progress import ProgressBoard
from keepstep.notices import notices_blocked
from keepstep.processes import module_command
from keepstep.transport import MalformedMessage, PeerUnavailable, StreamConnection, TransportError

log = logging.getLogger("keepstep")

_LAST_MESSAGES_S = 1.0
_KILL_S = 30.0
"""Seconds that a process may take to end after SIGKILL; freeing much pinned memory takes some."""
_SEND_S = 60.0
"""Large assignments do not fit a socket's buffer: who reads nothing for so long is stuck."""
_COLD_SEND_S = 600.0
"""The same of a process that imports PyTorch yet, perhaps from storage that is slow."""
_NEVER_STARTED = 1
"""The exit status of a worker whose process could not be started."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker has sent a message."""

    worker: Worker
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker's process has ended; `code` is negative for a signal."""

    worker: Worker
    code: int


WorkerEvent: TypeAlias = WorkerReport | WorkerExit


class Worker:
    """One worker process. Started by `start`, ended by `close`.

    Attributes:
        pid: its process id; 0 while the process is being forked.
        board: how far it is, in shared memory.
        assignment: its newest place in a generation; None for a spare.
        is_warm: it can be assigned at once.
        has_joined: its script has called `keepstep.join`.
        has_drained: it writes nothing more in its generation.
        finishing_step: the last step of its loop, once it has done that.
        is_ending: its script has failed, and it ends by itself once what runs at exit has run.
        is_stopping: the agent is ending it, so that its exit is no failure.
        asks_replacement: it ends by itself, because it can enter no other generation.
        kill_reason: why it was killed as if it had crashed; "" if it was not.
        code: its exit status; None while it lives.
    """

    def __init__(
        self,
        connection: StreamConnection[AgentMessage, WorkerMessage],
        board: ProgressBoard,
        on_event: Callable[[WorkerEvent], None],
    ) -> None:
        self._connection = connection
        self._on_event = on_event
        self._receiving = asyncio.create_task(self._receive_all())
        self._starting: asyncio.Task[None] | None = None
        self._reporting_exit: asyncio.Task[None] | None = None
        self._pidfd = -1
        self._exited = asyncio.Event()
        self._is_unkillable = False
        self.pid = 0
        self.board = board
        self.assignment: Assignment | None = None
        self.is_warm = False
        self.has_joined = False
        self.has_drained = False
        self.finishing_step: int | None = None
        self.is_ending = False
        self.is_stopping = False
        self.stored = (-1, 0)
        self.asks_replacement = False
        self.kill_reason = ""
        self.code: int | None = None

    @classmethod
    def start(
        cls,
        command: Command,
        environment: Mapping[str, str],
        on_event: Callable[[WorkerEvent], None],
        fork_server: ForkServerProcess | None = None,
    ) -> Worker:
        """Start a process that warms up and waits for its assignment.

        Call this on the main thread, for the worker ends when the thread that started it does.

        Args:
            command: what it runs.
            environment: its environment.
            on_event: called with what it reports, and when it ends.
            fork_server: what forks it, if it can; None: it is started as a program.
        """
        agent_end, worker_end = socket.socketpair()
        worker = cls(
            StreamConnection.over_pair(agent_end, PROTOCOL.server, "a worker process"),
            ProgressBoard.create("worker"),
            on_event,
        )
        if fork_server is None:
            with worker_end:
                worker._start_program(command, environment, worker_end)
        else:
            worker._starting = asyncio.create_task(
                worker._start_by(fork_server, command, environment, worker_end)
            )
        return worker

    async def _start_by(
        self,
        fork_server: ForkServerProcess,
        command: Command,
        environment: Mapping[str, str],
        worker_end: socket.socket,
    ) -> None:
        with worker_end:
            try:
                pid = await fork_server.fork(worker_end.fileno(), self.board.descriptor)
            except ForkingUnavailable:
                self._start_program(command, environment, worker_end)
            else:
                self._begin_or_kill(pid)

    def _start_program(
        self, command: Command, environment: Mapping[str, str], worker_end: socket.socket
    ) -> None:
        try:
            pid = _spawn(command, environment, worker_end, self.board)
        except OSError as error:
            log.error("a worker process cannot be started: %s", error)
            self._note_exit(_NEVER_STARTED)
        else:
            self._begin_or_kill(pid)

    def _begin_or_kill(self, pid: int) -> None:
        try:
            self._begin(pid)
        except OSError as error:
            log.error("a worker process cannot be supervised: %s", error)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.pid = 0
            self._note_exit(_NEVER_STARTED)

    def _begin(self, pid: int) -> None:
        """Supervise a process from now on; it is a child that nobody has waited for."""
        self.pid = pid
        self._connection.peer = f"worker process {pid}"
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _end_unstarted(self) -> None:
        """Give up a worker that has no process yet; one that still comes is killed."""
        assert self._starting is not None, "a worker without a process is being forked"
        self._starting.cancel()
        self._note_exit(-signal.SIGKILL)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.code is None

    @property
    def can_write(self) -> bool:
        """Whether it may still write in its generation."""
        return self.is_alive and not self.has_drained

    @property
    def is_reusable(self) -> bool:
        """Whether it can be assigned to another generation."""
        return self.is_alive and self.has_drained and not self.is_ending

    @property
    def rank(self) -> int | None:
        """Its rank in its newest generation; None for a spare."""
        return None if self.assignment is None else self.assignment.rank

    async def assign(self, assignment: Assignment, store_descriptor: int | None) -> None:
        """Send the worker its place in a generation.

        Args:
            assignment: the place.
            store_descriptor: the listening socket of the torch store that it is to serve, if it is.
        """
        self.assignment = assignment
        self.has_drained = False
        self.finishing_step = None
        # The worker forgets it: what an older generation stored may have been found damaged.
        self.stored = (-1, 0)
        message = Assign(assignment=assignment, serves_store=store_descriptor is not None)
        await self.send(message, store_descriptor)

    async def send(self, message: AgentMessage, descriptor: int | None = None) -> None:
        """Send a message. If the worker is gone, its exit is reported, and nothing here.

        One that has taken nothing for long is killed: all that the agent does waits for it.
        """
        limit_s = _SEND_S if self.is_warm else _COLD_SEND_S
        try:
            async with asyncio.timeout(limit_s):
                await self._connection.send(message, descriptor)
        except PeerUnavailable:
            return
        except TimeoutError:
            self.kill(f"it has taken no message for {limit_s:.0f} s")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and everything in its session."""
        if self.is_alive and self.pid:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return

    def kill(self, reason: str) -> None:
        """End the process at once, as a crash would; `reason` explains its exit to people."""
        self.kill_reason = reason
        self._kill_all()

    async def stop(self, grace_s: float) -> None:
        """End the process and return when it has ended.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; 0: SIGKILL at once.

        Raises:
            JobFailed: SIGKILL does not end it.
        """
        self.is_stopping = True
        # One whose script has not begun has nothing to end.
        if self.is_alive and grace_s > 0 and self.assignment is not None:
            # SIGKILL follows if that does not end it.
            with suppress(TimeoutError, PeerUnavailable):
                async with asyncio.timeout(grace_s):
                    if self.has_joined:
                        # By itself SIGTERM may have come from elsewhere, for all processes.
                        await self._connection.send(Stop())
                    self.signal(signal.SIGTERM)
                    await self._exited.wait()
        self._kill_all()
        try:
            async with asyncio.timeout(0.0 if self._is_unkillable else _KILL_S):
                await self._exited.wait()
        except TimeoutError:
            self._is_unkillable = True
            raise JobFailed(
                f"worker process {self.pid} cannot be killed: a device or a file system holds it; "
                f"see /proc/{self.pid}/stack"
            ) from None
        self.close()

    def close(self) -> None:
        """Kill the process if it lives, and release everything. Safe to call twice."""
        if self.is_alive:
            self.is_stopping = True
            self._kill_all()
            if self.pid:
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
                self._reap()
        self._receiving.cancel()
        self._connection.close()
        self.board.close()

    def _kill_all(self) -> None:
        """SIGKILL the worker, its session, and its descendants in sessions of their own.

        Data loaders and debuggers make such sessions. What copies the worker's output ends by
        itself, with the last of it.
        """
        if not self.is_alive:
            return
        if not self.pid:
            self._end_unstarted()
            return
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.signal(signal.SIGKILL)
        for child in children:
            try:
                if not copies_output(child.cmdline()):
                    child.kill()
            except psutil.Error:
                continue  # It has ended, or is another user's, by sudo.

    def _reap(self) -> None:
        """Take note of the exit. The pidfd is readable: the process has ended."""
        if self.code is not None:
            return
        # What it left running in its session would hold its devices and ports. Until the process is
        # reaped, no other process can get its id and so receive this.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._note_exit(os.waitstatus_to_exitcode(status))

    def _note_exit(self, code: int) -> None:
        self.code = code
        self._exited.set()
        self._reporting_exit = asyncio.get_running_loop().create_task(self._report_exit())

    async def _report_exit(self) -> None:
        """Report the exit after everything that was sent before it."""
        # A process that the worker started may hold its end open.
        await asyncio.wait([self._receiving], timeout=_LAST_MESSAGES_S)
        assert self.code is not None
        if note := self.board.note():
            self._report_note(note)
        self._on_event(WorkerExit(self, self.code))

    def _report_note(self, note: bytes) -> None:
        """Report why the worker has ended, which it could not send any more."""
        try:
            message = PROTOCOL.requests.decode(note, f"worker process {self.pid}")
        except MalformedMessage as error:
            log.warning("why a worker has ended is not known: %s", error)
            return
        self._on_event(WorkerReport(self, message))

    async def _receive_all(self) -> None:
        try:
            while (message := await self._connection.receive()) is not None:
                self._on_event(WorkerReport(self, message))
        except PeerUnavailable:
            return  # It ended in the middle of a message; its exit is reported.
        except TransportError as error:
            self.kill(f"its agent cannot read what it sends: {error}")


def _spawn(
    command: Command,
    environment: Mapping[str, str],
    worker_end: socket.socket,
    board: ProgressBoard,
) -> int:
    """Start a worker's process as a program, and return its id; the caller waits for it."""
    with notices_blocked():
        process = subprocess.Popen(
            module_command("keepstep.elastic.worker.bootstrap"),
            env={
                **environment,
                "KEEPSTEP_CHANNEL": str(worker_end.fileno()),
                "KEEPSTEP_PROGRESS": str(board.descriptor),
                "KEEPSTEP_COMMAND": command.encode(),
                "KEEPSTEP_AGENT_PID": str(os.getpid()),
            },
            pass_fds=(worker_end.fileno(), board.descriptor),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
    # `subprocess` waits for processes whose objects are gone, and would take their status.
    process.returncode = 0
    return process.pid


def describe_exit(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def worker_environment(base: Mapping[str, str], workers: int) -> Mapping[str, str]:
    """Return the environment that all workers of a node share.

    One thread per worker unless the user chose otherwise, as torchrun has it: several workers with
    a thread per core each would fight for the cores.
    """
    environment = dict(base)
    if workers > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
