"""Claims about one worker process and what it starts."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.elastic.agent import supervisor
from keepstep.elastic.agent.supervisor import Worker, WorkerEvent, WorkerExit
from keepstep.elastic.worker.messages import Command, CommandKind, SnapshotCommitted
from tests.adaptive_timeouts import patient


def spawning(*command: str) -> Callable[..., int]:
    """Return what starts a program where a worker's process would be started."""

    def spawn(*_: object) -> int:
        process = subprocess.Popen(command, start_new_session=True)
        process.returncode = 0
        return process.pid

    return spawn


def test_what_a_worker_left_running_is_killed_before_its_id_may_be_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: list[str] = []

    def kill_session(session: int, _: int) -> None:
        stat = Path(f"/proc/{session}/stat")
        states.append(stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "gone")

    monkeypatch.setattr(supervisor, "_spawn", spawning("true"))
    monkeypatch.setattr(os, "killpg", kill_session)

    async def scenario() -> None:
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        worker = Worker.start(Command(CommandKind.PROGRAM, "", ()), {}, events.put_nowait)
        async with asyncio.timeout(patient(10)):
            assert await events.get() == WorkerExit(worker, 0)
        worker.close()

    asyncio.run(scenario())
    assert states == ["Z"], "it has ended, and nobody has waited for it"


def test_process_that_cannot_be_started_has_failed_and_ends_no_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node was lost with its memory where there was no room for a process for a moment."""

    def spawn(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "_spawn", spawn)

    async def scenario() -> None:
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        worker = Worker.start(Command(CommandKind.PROGRAM, "", ()), {}, events.put_nowait)
        async with asyncio.timeout(patient(10)):
            match await events.get():
                case WorkerExit(ended, code):
                    assert ended is worker
                    assert code != 0
                case other:
                    raise AssertionError(other)
        worker.close()

    asyncio.run(scenario())
    assert "a worker process cannot be started" in caplog.text


def test_process_of_another_user_keeps_no_other_from_being_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that the script had started by sudo ended the agent, and hid the job's failure."""
    killed: list[str] = []

    class Child:
        def __init__(self, name: str) -> None:
            self.name = name

        def cmdline(self) -> list[str]:
            return [self.name]

        def kill(self) -> None:
            if self.name == "another user's":
                raise psutil.AccessDenied(1)
            killed.append(self.name)

    children = [Child("another user's"), Child("own")]
    monkeypatch.setattr(supervisor, "_spawn", spawning("sleep", "600"))
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: children)

    async def scenario() -> None:
        worker = Worker.start(Command(CommandKind.PROGRAM, "", ()), {}, lambda _: None)
        async with asyncio.timeout(patient(30)):
            await worker.stop(0.0)

    asyncio.run(scenario())
    assert killed == ["own"]


def test_process_that_cannot_be_supervised_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    spawn = spawning("sleep", "600")

    def noting(*arguments: object) -> int:
        started.append(spawn(*arguments))
        return started[0]

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(supervisor, "_spawn", noting)
    monkeypatch.setattr(os, "pidfd_open", refuse)

    async def scenario() -> None:
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        worker = Worker.start(Command(CommandKind.PROGRAM, "", ()), {}, events.put_nowait)
        async with asyncio.timeout(patient(10)):
            assert isinstance(await events.get(), WorkerExit)
        worker.close()

    asyncio.run(scenario())
    assert not psutil.pid_exists(started[0])


def test_worker_that_takes_no_messages_is_killed_and_keeps_the_agent_waiting_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large assignments do not fit a socket's buffer; the agent did nothing else any more."""
    ends: list[int] = []

    def spawn(command: Command, environment: Mapping[str, str], end: socket.socket, _: Any) -> int:
        # As a worker that is stopped holds it.
        ends.append(os.dup(end.fileno()))
        return spawning("sleep", "600")()

    monkeypatch.setattr(supervisor, "_spawn", spawn)
    monkeypatch.setattr(supervisor, "_SEND_S", 0.5)

    async def scenario() -> None:
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        worker = Worker.start(Command(CommandKind.PROGRAM, "", ()), {}, events.put_nowait)
        async with asyncio.timeout(patient(20)):
            worker.is_warm = True
            while worker.is_alive and not worker.kill_reason:
                await worker.send(SnapshotCommitted(step=1))
                await asyncio.sleep(0)
            assert await events.get() == WorkerExit(worker, -signal.SIGKILL)
        assert worker.kill_reason == "it has taken no message for 0 s"
        worker.close()
        os.close(ends.pop())

    asyncio.run(scenario())
