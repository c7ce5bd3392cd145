"""Worker processes as their agent sees them: started warm, told things, listened to, ended with everything they started.

`Worker` owns one process, the line to it and its progress board; `close` ends all three. What the worker says and how it exits
reaches the agent through one callback, on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from keepstep.elastic.worker.bootstrap import Command
from keepstep.elastic.worker.channel import AgentChannel, Message
from keepstep.elastic.worker.session import Assignment
from keepstep.monitor.progress import ProgressBoard
from keepstep.processes import module_command


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Something a worker said."""

    worker: Worker
    message: Message


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker's process has ended; `code` is negative for a signal."""

    worker: Worker
    code: int


class Worker:
    """One worker process. Started by `start`, ended by `close`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: AgentChannel,
        board: ProgressBoard,
        report: Callable[[WorkerReport | WorkerExit], None],
    ) -> None:
        self._process = process
        self._channel = channel
        self.board = board
        self._report = report
        self._listener = asyncio.create_task(self._listen())
        self._pidfd = os.pidfd_open(process.pid)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        self.assignment: Assignment | None = None
        self.warm = False
        self.joined = False
        self.drained = False
        self.finishing: int | None = None
        self.stopping = False
        self.kill_reason = ""
        self.traceback = ""
        self.fatal = False
        self.code: int | None = None

    @classmethod
    def start(
        cls,
        command: Command,
        environment: Mapping[str, str],
        report: Callable[[WorkerReport | WorkerExit], None],
    ) -> Worker:
        """Start a process that warms up and waits for its assignment. Call on the main thread, whose death ends the worker."""
        ours, theirs = socket.socketpair()
        board = ProgressBoard.create("worker")
        with theirs:
            process = subprocess.Popen(
                module_command("keepstep.elastic.worker.bootstrap"),
                env={
                    **environment,
                    "KEEPSTEP_CHANNEL": str(theirs.fileno()),
                    "KEEPSTEP_PROGRESS": str(board.descriptor),
                    "KEEPSTEP_COMMAND": command.encode().decode(),
                    "KEEPSTEP_AGENT_PID": str(os.getpid()),
                },
                pass_fds=(theirs.fileno(), board.descriptor),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        return cls(process, AgentChannel(ours), board, report)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.code is None

    async def assign(self, assignment: Assignment, descriptor: int | None) -> None:
        """Give the worker its place in a generation, and the rendezvous socket if it is to serve it."""
        self.assignment = assignment
        self.drained = False
        self.finishing = None
        await self.send({"type": "assign", "assignment": assignment.to_json()}, descriptor)

    async def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send a message; a worker that is gone is reported by its exit, not here."""
        try:
            await self._channel.send(message, descriptor)
        except OSError:
            return

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and all that it started and left in its session."""
        if self.alive:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def kill(self, reason: str) -> None:
        """End the process at once, as a crash would; `reason` is why, for its exit to be explained by."""
        self.kill_reason = reason
        self._kill_all()

    async def stop(self, grace_s: float) -> None:
        """End the process: SIGTERM, and SIGKILL after `grace_s` seconds; returns when it has ended."""
        self.stopping = True
        if self.alive and grace_s > 0:
            self.signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._exited.wait(), grace_s)
            except TimeoutError:
                pass  # SIGKILL follows.
        self._kill_all()
        await self._exited.wait()
        self.close()

    def close(self) -> None:
        """Kill the process if it lives, and release everything. Safe to call twice."""
        if self.alive:
            self.stopping = True
            self._kill_all()
            self._process.wait()
            self._reap()
        self._listener.cancel()
        self._channel.close()
        self.board.close()

    def _kill_all(self) -> None:
        """SIGKILL the worker, its session, and children that made sessions of their own (data loaders, debuggers)."""
        if not self.alive:
            return
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.signal(signal.SIGKILL)
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue

    def _reap(self) -> None:
        """The pidfd is readable: the process has ended."""
        if self.code is not None:
            return
        code = self._process.poll()
        if code is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.code = code
        # What it left running in its session would hold its devices and ports.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._exited.set()
        asyncio.get_running_loop().create_task(self._report_exit())

    async def _report_exit(self) -> None:
        """Report the exit after everything that was said before it."""
        await asyncio.wait([self._listener], timeout=1.0)
        assert self.code is not None
        self._report(WorkerExit(self, self.code))

    async def _listen(self) -> None:
        while (message := await self._channel.receive()) is not None:
            self._report(WorkerReport(self, message))


def describe_exit(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def worker_environment(base: Mapping[str, str], workers: int) -> dict[str, Any]:
    """Return the environment that all workers of a node share.

    One thread per worker unless the user says otherwise, as torchrun has it: several workers with a thread per core each
    would fight for the cores.
    """
    environment = dict(base)
    if workers > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
