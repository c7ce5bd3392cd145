"""Claims about one worker process and what it starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.elastic.agent import supervisor
from keepstep.elastic.agent.supervisor import Worker, WorkerEvent, WorkerExit
from keepstep.elastic.worker.messages import Command, CommandKind
from tests.patience import patient


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
